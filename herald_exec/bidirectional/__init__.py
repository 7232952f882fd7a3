"""Decoding of bidirectional models (LLaDA, Dream) with caches that age: the loop, and tools that judge it."""

from herald_exec.bidirectional.batch import Batch, make_batch
from herald_exec.bidirectional.loop import Decoded, Loop, Round, decode

__all__ = ["Batch", "Decoded", "Loop", "Round", "decode", "make_batch"]
