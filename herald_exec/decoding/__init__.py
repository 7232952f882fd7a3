"""Decoding sessions: token ids in, pieces of answers out, round by round, for a batch of ragged rows.

:func:`start_session` picks by the model's attention: block-causal models decode block after block with an exact KV
cache, bidirectional ones by scheduler and cache rule.
"""

from collections.abc import Sequence

from herald_exec.decoding.block_causal import BlockCausalSession
from herald_exec.decoding.full_attention import FullAttentionSession
from herald_exec.decoding.session import DecodeSettings, Piece, RowStatistics, Session
from herald_exec.models.base import BlockModel
from herald_pipeline.model import Attention

__all__ = ["DecodeSettings", "Piece", "RowStatistics", "Session", "start_session"]


def start_session(model: BlockModel, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> Session:
    """Session for a batch of prompts; :class:`ConfigError` for prompts that do not fit the model."""
    if model.shape.attention is Attention.BIDIRECTIONAL:
        return FullAttentionSession(model, prompts, settings)
    return BlockCausalSession(model, prompts, settings)
