"""KV storage: where it lives, who owns it, how many bytes a request needs, and who reads and writes which part.

Hazards are per (request slot, layer, region). A pool with two buffers is double-buffered: block n reads buffer n % 2
(**active**) while the retrieval of block n + 1 writes the other one (**idle**); the **swap** is that n moves on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Home(StrEnum):
    """Which memory holds a pool."""

    HBM = "hbm"
    DRAM = "dram"


class Region(StrEnum):
    """Which part of a pool an access touches."""

    WHOLE = "whole"
    PREFIX = "prefix"
    """Completed positions before the row's block n: [0, S)."""
    BLOCK = "block"
    """Positions of block n: [S, S + B)."""
    SELECTED = "selected"
    """The k selected entries of a sparse pool; only their keys where a method brings the values apart."""
    VALUES = "values"
    """The values of the selected entries, where they come from elsewhere than the keys."""
    TAIL = "tail"
    """The clean KV of the newest completed block, behind the selected entries."""
    SCRATCH = "scratch"
    """The block's own KV of the current step, behind the tail."""


class Buffer(StrEnum):
    """Which buffer of a pool an access touches."""

    ONE = "one"
    ACTIVE = "active"
    """n % 2: read by block n's steps."""
    IDLE = "idle"
    """(n + 1) % 2: written for block n + 1."""
    RING = "ring"
    """Launch number modulo the number of buffers: staging that is reused in turn."""


@dataclass(frozen=True, slots=True)
class Access:
    """One read or write of a stage. ``layers``: ``None`` means the launch's own layer, or all layers of the pool."""

    pool: str
    region: Region = Region.WHOLE
    buffer: Buffer = Buffer.ONE
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestSize:
    """What a request's pool bytes depend on: tokens at the end of the run, k then, and the block length."""

    tokens: int
    selected_tokens: int
    block_length: int


@dataclass(frozen=True, slots=True)
class Pool:
    """A declared piece of KV storage.

    Attributes
    ----------
    bytes_per_request
        Size -> bytes that one request slot takes in **one** buffer, all layers of the pool together.
    buffers
        1, 2 for a double-buffered pool, or the places of a staging ring.
    layers
        Layers it holds.
    shared
        A staging buffer that all requests use in turn, not one part per request slot. Its size is still
        ``bytes_per_request`` times the batch, because a launch moves the whole batch.
    prompt_only
        Used while one request's prompt is prefilled: counted once, not per request of the batch.
    fixed
        One for the whole run: its bytes do not grow with the batch.
    pinned
        Page-locked host memory, so that copies to the device are asynchronous.
    """

    name: str
    home: Home
    layers: tuple[int, ...]
    bytes_per_request: Callable[[RequestSize], float] = field(repr=False)
    buffers: int = 1
    shared: bool = False
    prompt_only: bool = False
    fixed: bool = False
    pinned: bool = False
    purpose: str = ""
