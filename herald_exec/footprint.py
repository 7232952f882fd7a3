"""What a run takes of the memories beside its pools, for the capacity formula: known before anything is allocated."""

from herald_pipeline.memory import Memory
from herald_pipeline.pipeline import Pipeline

LOGITS_AT_ONCE = 16384
"""Entries of the vocabulary whose logits the fused head holds at a time."""
WORKSPACE_BYTES = 32 << 20
"""What cuBLAS keeps for each stream that multiplies (PyTorch's default on an H100 or H200)."""


def run_memory(
    hbm_bytes: float, host_bytes: float, pipeline: Pipeline, *, on_gpu: bool, synthetic: bool, fused: bool = True
) -> Memory:
    """Memory within limits, as a run of ``pipeline`` uses it.

    Parameters
    ----------
    hbm_bytes, host_bytes
        What the run may have of each memory, the runtime's own part not counted.
    on_gpu, fused
        Whether the model is on a GPU, and decodes on the fused path: whole logits are never held there, uploads land in
        a buffer of their own, and libraries keep a workspace for every stream.
    synthetic
        KV is drawn where it stays, so no prompt goes through the model.
    """
    if not on_gpu:
        return Memory(hbm_bytes, hbm_bytes, host_bytes, prefills=not synthetic, prompts_wait_in_layer=True)
    multiplying = {stage.stream for stage in pipeline.template.stages() if stage.resource == "gpu"}
    vocabulary = pipeline.model.vocab_size
    return Memory(
        hbm_bytes,
        hbm_bytes,
        host_bytes,
        logit_bytes=4.0 * min(LOGITS_AT_ONCE, vocabulary) / vocabulary if fused else 4.0,
        prefills=not synthetic,
        prompts_wait_in_layer=True,
        # One more: the default stream, on which weights are drawn or turned.
        workspace_bytes=float((len(multiplying) + 1) * WORKSPACE_BYTES),
        lands_uploads=fused,
    )
