"""Decoding of prompts: token ids in, pieces of answers out as they become final, in batches of ragged rows.

Block-causal models run on the executor's runner, by any method; bidirectional ones by scheduler and cache rule.
"""

from collections.abc import Sequence

from herald_exec.decoding.block_causal import decode_block_causal
from herald_exec.decoding.delivery import (
    DecodeSettings,
    Delivery,
    FinishReason,
    OnPiece,
    Piece,
    RowStatistics,
    prompt_problem,
)
from herald_exec.decoding.full_attention import decode_full_attention
from herald_exec.models.base import BlockModel
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import Attention

__all__ = ["DecodeSettings", "FinishReason", "OnPiece", "Piece", "RowStatistics", "decode_prompts"]


def decode_prompts(
    model: BlockModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_piece: OnPiece,
    *,
    batch_size: int = 8,
) -> list[RowStatistics]:
    """Decode prompts (token ids); ``on_piece`` gets every answer's tokens in order.

    Returns the prompts' statistics, in order.

    Raises
    ------
    ConfigError
        Prompts do not fit the model (all such prompts are named), or settings make no sense for it.
    """
    raise_problems([check_number(batch_size, "batch", minimum=1, integer=True)])
    if not prompts:
        message = "no prompts; give at least one"
        raise ConfigError(message)
    shape = model.shape
    raise_problems(prompt_problem(shape, settings, index, prompt) for index, prompt in enumerate(prompts))
    delivery = Delivery(shape, prompts, settings, on_piece)
    if shape.attention is not Attention.BIDIRECTIONAL:
        decode_block_causal(model, prompts, settings, delivery, batch_size)
    elif settings.method != "dense":
        message = f"{shape.name} is bidirectional: it has no method but 'dense', with a cache; got {settings.method!r}"
        raise ConfigError(message)
    else:
        decode_full_attention(model, prompts, settings, delivery, batch_size)
    return delivery.statistics
