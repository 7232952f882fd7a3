"""What a run takes of the memories beside its pools, for the capacity formula: known before anything is allocated."""

from herald_pipeline.capacity import budget
from herald_pipeline.errors import CapacityError
from herald_pipeline.memory import UNLIMITED_BYTES, Memory
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home
from herald_pipeline.units import GB
from herald_pipeline.workload import Workload

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


def beside_pools_bytes(
    pipeline: Pipeline, tokens: int, batch: int, *, weight_bytes: int, on_gpu: bool, fused: bool
) -> float:
    """Bytes that stay in device memory beside the pools of ``batch`` requests that end with ``tokens`` KV entries.

    Parameters
    ----------
    weight_bytes
        Bytes of the model's weights as they are.
    on_gpu, fused
        As for :func:`run_memory`.
    """
    memory = run_memory(UNLIMITED_BYTES, UNLIMITED_BYTES, pipeline, on_gpu=on_gpu, synthetic=True, fused=fused)
    counted = {"weights", *(pool.name for pool in pipeline.pools)}
    items = budget(pipeline, tokens, batch, memory).items
    others = (item for item in items if item.home is Home.HBM and not item.transient and item.name not in counted)
    return weight_bytes + sum(item.num_bytes for item in others)


def require_host_memory(
    pipeline: Pipeline, lengths: Workload, host_bytes: int, *, weight_bytes: int, on_gpu: bool
) -> None:
    """Refuse a batch whose pools, and on the CPU whose weights, are more than all memory of this machine.

    Parameters
    ----------
    host_bytes
        All host memory that this process could ever have.
    weight_bytes
        Bytes of one weight.

    Raises
    ------
    CapacityError
        With what is needed and what there is.
    """
    unlimited = run_memory(UNLIMITED_BYTES, UNLIMITED_BYTES, pipeline, on_gpu=on_gpu, synthetic=True)
    batch = min(lengths.batch, len(lengths.requests))
    found = budget(pipeline, lengths.largest_request_tokens, batch, unlimited)
    weights = 0.0 if on_gpu else pipeline.model.weight_bytes(weight_bytes)
    kept = [item for item in found.items if item.name != "weights" and (item.home is Home.DRAM or not on_gpu)]
    pools = sum(item.num_bytes for item in kept)
    if weights + pools <= host_bytes:
        return
    parts = f"{pools / GB:,.1f} GB of KV pools and buffers"
    if weights:
        parts = f"{weights / GB:,.1f} GB of weights and {parts}"
    message = (
        f"{pipeline.model.name} with {pipeline.method.name}, batch {batch}, does not fit: it takes {parts}, and this "
        f"machine has {host_bytes / GB:,.1f} GB of memory; take a smaller model, context or batch, plan it with "
        "`herald-sim peak`, or state --host-limit-gb where the machine has more than it shows"
    )
    raise CapacityError(message)
