"""The vocabulary of a pipeline: ops, stages, streams, edges and the template of one block.

A **stage** is one launch: what is scheduled, measured and traced, one entry of an in-order stream. An **op** is what a
stage costs. Streams are queues; **overlap is nothing but a missing edge between streams**. A **template** says how a
method decodes one block; the program (:mod:`herald_pipeline.scheduling.program`) instantiates it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from herald_pipeline.pools import Access


class OpKind(StrEnum):
    """What an op does; a cost model prices each kind, an executor counts its bytes."""

    EMBED = "embed"
    QKV = "qkv"
    ATTENTION = "attention"
    OUTPUT = "output"
    FFN = "ffn"
    EXPERTS = "experts"
    HEAD = "head"
    SAMPLE = "sample"
    SELECT = "select"
    SELECT_KEYS = "select_keys"
    """Selection that reads keys, and values of what it selects alone."""
    SELECT_INT8 = "select_int8"
    """Selection over a copy of the keys in 8 bits."""
    TOP_K = "top_k"
    PROXY = "proxy"
    FACTOR = "factor"
    """Low-rank factors of keys, and keys turned into their coefficients."""
    REBUILD = "rebuild"
    """Keys out of their coefficients."""
    GATHER = "gather"
    GATHER_FUSED = "gather_fused"
    """Gather by a selection's own workers, each right behind its top-k."""
    COPY = "copy"
    REFRESH = "refresh"


class Layout(StrEnum):
    """How the bytes of a copy lie; it decides the rate."""

    CONTIGUOUS = "contiguous"
    STREAMED = "streamed"
    """A layer at a time, beside selection on the device."""
    SCATTERED = "scattered"
    """Single rows, picked by index."""
    ROWS = "rows"
    """The same, read from host memory by the device itself."""


SELECTIONS = frozenset({OpKind.SELECT, OpKind.SELECT_KEYS, OpKind.SELECT_INT8})
"""Kinds of ops that scan a prefix in host memory."""


# Ops, groups and shapes are made anew for every block: named tuples, which cost a fraction of a frozen dataclass.


class Op(NamedTuple):
    """One piece of work: its kind and its demand on each resource.

    Attributes
    ----------
    tokens
        Rows of the matrix products (positions forwarded); decides GEMM efficiency and the experts hit. How many kernels
        an op is launched as is a fact of the engine, not of the description.
    gpu_flops, cpu_flops
        Floating-point operations on the processor.
    hbm_bytes, dram_bytes
        Bytes read and written in device and host memory. ``weight_bytes`` is the part of ``hbm_bytes`` that is weights.
    beside_copy_bytes, beside_gather_bytes
        Bytes that the upload, and the gather, of what a scan has found move in host memory while the next one runs;
        their own ops count them, this one says that memory has them to move as well.
    h2d_bytes, d2h_bytes
        Bytes over the link, host to device and device to host.
    queries
        Query tokens per request that score the KV cache (selection), else 0.
    """

    kind: OpKind
    tokens: int = 0
    gpu_flops: float = 0.0
    hbm_bytes: float = 0.0
    weight_bytes: float = 0.0
    cpu_flops: float = 0.0
    dram_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    queries: int = 0
    layout: Layout = Layout.CONTIGUOUS
    beside_copy_bytes: float = 0.0
    beside_gather_bytes: float = 0.0


class Repeat(NamedTuple):
    """``ops`` in order, ``count`` times: the layers of a forward that cost the same."""

    count: int  # type: ignore[assignment]  # a tuple counts values by this name, which nobody asks of it
    ops: tuple[Op, ...]


Work = tuple[Repeat, ...]
"""What one launch costs, in order."""


def once(*ops: Op) -> Work:
    """Work of ``ops`` done one time."""
    return (Repeat(1, ops),)


class Mode(StrEnum):
    """What a row does in a forward."""

    DENOISE = "denoise"
    """Forward B positions, some masked; accept some."""
    DRAFT = "draft"
    """DENOISE, and a draft group of B further positions whose KV goes to the host (paper section IV-B2)."""
    COMPLETE = "complete"
    """Forward the completed block once more: its KV is the block's clean KV."""
    COMPLETE_DRAFT = "complete_draft"
    """COMPLETE of a row that was complete after step 0: the block is its own draft."""

    @property
    def groups(self) -> int:
        """B-token groups that the row forwards."""
        return 2 if self is Mode.DRAFT else 1

    @property
    def completes(self) -> bool:
        """Whether the block's clean KV comes out of this forward."""
        return self in (Mode.COMPLETE, Mode.COMPLETE_DRAFT)

    @property
    def drafts(self) -> bool:
        """Whether the draft's KV comes out of this forward."""
        return self in (Mode.DRAFT, Mode.COMPLETE_DRAFT)


class RowGroup(NamedTuple):
    """Rows (request slots) that do the same in one launch.

    ``blocks[i]`` is the block index of ``slots[i]`` (0 is the first block of its answer, -1 its prompt).
    ``prefix_tokens``, ``selected_tokens`` and ``tail_tokens`` are sums over the rows of S (completed KV entries
    without the block), k (entries in use by a step, or to be selected by a selection) and the clean block behind them.
    """

    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    mode: Mode
    prefix_tokens: int
    selected_tokens: int
    tail_tokens: int


class LaunchShape(NamedTuple):
    """Totals over a launch's row groups: all that a stage's work depends on."""

    rows: int
    tokens: int
    """Positions forwarded: B a row, 2B where a draft group goes along."""
    masked_tokens: int
    """Positions of rows that still hold masked ones."""
    prefix_tokens: int
    """Sum of S."""
    selected_tokens: int
    """Sum of k, per KV head."""
    tail_tokens: int
    """Sum of the newest blocks' entries that stand behind the selected ones."""
    prefix_pairs: int
    """Sum over rows of queries x S: the query-key pairs of exact attention to the prefix."""
    selected_pairs: int
    """Sum over rows of queries x (k + tail)."""
    completed_rows: int = 0
    """Rows whose block's clean KV comes out."""
    drafted_rows: int = 0
    """Rows whose draft KV comes out."""


def launch_shape(groups: Sequence[RowGroup], block_length: int) -> LaunchShape:
    """Totals of ``groups`` for blocks of ``block_length`` tokens."""
    rows = tokens = masked = prefix = selected = tail = 0
    prefix_pairs = selected_pairs = completed = drafted = 0
    for group in groups:
        count = len(group.slots)
        queries = block_length * group.mode.groups
        rows += count
        tokens += count * queries
        prefix += group.prefix_tokens
        selected += group.selected_tokens
        tail += group.tail_tokens
        prefix_pairs += queries * group.prefix_tokens
        selected_pairs += queries * (group.selected_tokens + group.tail_tokens)
        if group.mode.completes:
            completed += count
        else:
            masked += count * block_length
        if group.mode.drafts:
            drafted += count
    return LaunchShape(
        rows,
        tokens,
        masked,
        prefix,
        selected,
        tail,
        prefix_pairs,
        selected_pairs,
        completed,
        drafted,
    )


class Rows(StrEnum):
    """Which rows of a cohort take part in a stage."""

    RUNNING = "running"
    """Rows whose block is not yet completed."""
    NEXT = "next"
    """Rows that have a block after this one."""
    COHORT = "cohort"
    """All rows that began this block together."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One launch of the description.

    Attributes
    ----------
    name
        Unique in its template; what traces and edges call it.
    action
        What the executor binds to a function (several stages may share one).
    stream
        The in-order queue it is issued to.
    work
        Launch shape and layer -> the ops it costs.
    layers
        Layers it is launched for, one launch each; empty: one launch for all.
    reads, writes
        Pool accesses, for the hazard check.
    drafts, completes
        Further writes of a forward that carries a draft group, or a completed block.
    decides
        Whether its end tells which rows still have masked positions.
    lead
        Rounds of layers that it runs ahead of its section: 1 issues it for layer l + 1 beside layer l of the others.
    resource
        The lane on which its time is drawn: ``gpu``, ``cpu``, ``h2d``, ``d2h``.
    """

    name: str
    action: str
    stream: str
    resource: str
    work: Callable[[LaunchShape, int | None], Work] = field(repr=False)
    layers: tuple[int, ...] = ()
    rows: Rows = Rows.COHORT
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    drafts: tuple[Access, ...] = ()
    completes: tuple[Access, ...] = ()
    decides: bool = False
    lead: int = 0


class LayerLink(StrEnum):
    """Which layer's launch of the earlier stage an edge waits for."""

    SAME = "same"
    PREVIOUS = "previous"
    LAST = "last"
    """Its last layer; streams are in order, so all layers."""


@dataclass(frozen=True, slots=True)
class Edge:
    """``after`` waits for ``before``; only needed between streams.

    ``block_offset`` 1 waits for the launch of the row's previous block (its prefill, for block 0). ``ring`` > 0 instead
    makes launch i of ``after`` wait for launch i - ring of ``before``, counted over the run: the reuse of a staging
    buffer that has ``ring`` places.
    ``first_only``: only the first launch of ``after`` in a block waits (its first layer, its first step).
    """

    before: str
    after: str
    layer: LayerLink = LayerLink.LAST
    block_offset: int = 0
    ring: int = 0
    first_only: bool = False
    why: str = ""

    def __str__(self) -> str:
        suffix = " of the previous block" if self.block_offset else ""
        suffix += f" {self.ring} launches ago" if self.ring else ""
        return f"{self.before}{suffix} -> {self.after}"


@dataclass(frozen=True, slots=True)
class Section:
    """Stages issued together; with layers, layer by layer (all stages of layer 0, then of layer 1, ..)."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """An in-order queue of launches. ``high_priority`` kernels start before others at an op boundary.

    That holds for kernels that fetch rows of host memory, too: they then keep some multiprocessors to themselves.
    """

    name: str
    high_priority: bool = False


@dataclass(frozen=True, slots=True)
class Template:
    """How a method decodes one block.

    Attributes
    ----------
    head
        Sections issued when rows begin a block, before the first step of ``denoise``.
    denoise
        The denoise step; repeated until no row of the cohort runs.
    step
        Sections issued before ``denoise`` in every step: a step that goes layer by layer, whose end ``denoise`` is.
    first_step
        Index of the first repetition (1 where the head itself holds step 0).
    draft_step
        Step whose forward carries the draft group, or ``None``.
    after_step
        Sections issued after the step of that index.
    tail
        Sections issued when rows have completed the block.
    prefill
        Sections issued when requests are admitted.
    lookahead
        Blocks between selection and use: 1 where block n uses what was selected during block n - 1, and the block
        between them stands in the pool's tail.
    """

    streams: tuple[Stream, ...]
    denoise: Stage
    head: tuple[Section, ...] = ()
    step: tuple[Section, ...] = ()
    after_step: Mapping[int, tuple[Section, ...]] = field(default_factory=dict)
    tail: tuple[Section, ...] = ()
    prefill: tuple[Section, ...] = ()
    edges: tuple[Edge, ...] = ()
    first_step: int = 0
    draft_step: int | None = None
    lookahead: int = 0

    def in_line(self) -> tuple[Stage, ...]:
        """Stages of a pass that a block begins with on a compute stream of its own: its steps wait for it.

        A pass that serves the next block (:attr:`Rows.NEXT`) runs beside the steps.
        """
        begins = [stage for section in self.head for stage in section.stages if stage.rows is not Rows.NEXT]
        own = {stage.stream for stage in begins if stage.resource == "gpu"} - {self.denoise.stream}
        return tuple(stage for stage in begins if stage.stream in own)

    def stages(self) -> tuple[Stage, ...]:
        """Every stage once, in the order of issue."""
        sections = [*self.prefill, *self.head]
        sections += self.step
        found = [stage for section in sections for stage in section.stages]
        found.append(self.denoise)
        for step in sorted(self.after_step):
            found += [stage for section in self.after_step[step] for stage in section.stages]
        found += [stage for section in self.tail for stage in section.stages]
        return tuple(found)
