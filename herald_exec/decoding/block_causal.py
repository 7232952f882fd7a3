"""Block-causal decoding (SDAR, LLaDA2) by any method, on the executor's runner."""

from collections.abc import Sequence

import torch

from herald_exec import execution
from herald_exec.decoding.delivery import DecodeSettings, Delivery
from herald_exec.models.base import BlockModel
from herald_exec.policy import RulePolicy
from herald_exec.requests import DecodeRequest
from herald_pipeline import pipeline as pipelines
from herald_pipeline.model import KVDtype
from herald_pipeline.scheduling.program import BatchPolicy

_KV_DTYPES = {
    torch.float32: KVDtype.FP32,
    torch.bfloat16: KVDtype.BF16,
    torch.float16: KVDtype.FP16,
}


def decode_block_causal(
    model: BlockModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    delivery: Delivery,
    batch_size: int,
) -> None:
    """Decode all prompts, ``batch_size`` at a time; a prompt takes the slot of the first answer that ends.

    Rows never wait for slower ones. Pieces come whenever a block's completing forward has run.
    """
    kv_dtype = _KV_DTYPES[model.kv_dtype]
    described = pipelines.build(
        model.shape,
        settings.method,
        **{
            "block_length": settings.block_length,
            "kv_dtype": kv_dtype,
            "dram_kv_dtype": kv_dtype,
            **settings.method_settings,
        },
    )
    policy = RulePolicy(
        settings.policy.rule, settings.sampler(model.shape.mask_token_id), settings.policy.steps, settings.seed
    )
    options = execution.Options(
        batch=min(batch_size, len(prompts)),
        policy=BatchPolicy.FIRST_DONE_FIRST_OUT,
        # End tokens are the delivery's business: it also knows those that a caller gives.
        ignore_eos=True,
        on_block=delivery.deliver,
    )
    requests = [DecodeRequest(index, tuple(prompt), settings.max_new_tokens) for index, prompt in enumerate(prompts)]
    run = execution.decode(described, model, requests, policy=policy, options=options)
    for index, blocks in run.commits.items():
        statistics = delivery.statistics[index]
        statistics.blocks = len(blocks)
        # T denoising forwards and the completing one.
        statistics.forwards = sum(len(steps) + 1 for steps in blocks)
