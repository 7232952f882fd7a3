"""Memory of closed pools, kept for the next one: a sweep maps, touches and fills its largest pool once.

Filling 100 GB takes half a minute, longer than what is then measured in it. Inside :func:`keep_memory` a pool of
:data:`LEAST_BYTES` or more leaves its memory behind, and the next such pool that fits begins with it. Contents stay: a
pool that asks for unit normals finds them there, but for the blocks that runs before it have appended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import _core

LEAST_BYTES = 1 << 30
"""Smaller pools (drafts, staging) come and go beside the large one, and are no matter of seconds."""
_ROOM = 1.02
"""A little more than asked for, so that a pool of as many tokens in other slots fits as well."""


@dataclass
class Memory:
    """One mapping: its address, its bytes, and how many of them hold unit normals of ``filled_dtype``."""

    address: int
    nbytes: int
    filled_bytes: int = 0
    filled_dtype: str = ""


_keeping = False
_kept: Memory | None = None


@contextmanager
def keep_memory() -> Iterator[None]:
    """Large pools that close meanwhile leave their memory to the next; freed at the end."""
    global _keeping
    before, _keeping = _keeping, True
    try:
        yield
    finally:
        _keeping = before
        if not before:
            release()


def release() -> None:
    """Free what is kept now; pools in use are left alone."""
    global _kept
    if _kept is not None:
        _core.unmap_memory(_kept.address, _kept.nbytes)
        _kept = None


def held() -> Memory | None:
    """What is kept now, to be looked at; it stays kept."""
    return _kept


def take(nbytes: int) -> Memory | None:
    """Memory of at least ``nbytes``: what is kept if it is enough, else new; ``None`` where none can be mapped."""
    global _kept
    large = _keeping and nbytes >= LEAST_BYTES
    if large and _kept is not None:
        if _kept.nbytes >= nbytes:
            found, _kept = _kept, None
            return found
        release()
    size = int(nbytes * _ROOM) if large else nbytes
    address = _core.map_memory(size) if size < 2**62 else 0
    return Memory(address, size) if address else None


def give(memory: Memory) -> None:
    """A pool has closed: its memory is kept, or freed. Of two large ones the larger is kept."""
    global _kept
    if _keeping and memory.nbytes >= LEAST_BYTES:
        if _kept is None:
            _kept = memory
            return
        if memory.nbytes > _kept.nbytes:
            memory, _kept = _kept, memory
    _core.unmap_memory(memory.address, memory.nbytes)
