"""What the actions of one run share, and the task that each launch becomes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from herald_exec.models.base import BlockModel
from herald_exec.policy import Policy
from herald_exec.pools import Pools
from herald_exec.requests import Row, RowState
from herald_exec.windows import window_mask
from herald_pipeline.errors import PipelineError, RunError, did_you_mean
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Buffer, Region
from herald_pipeline.scheduling.launches import Launch
from herald_pipeline.stages import OpKind, Stage


@dataclass(slots=True, eq=False)
class Task:
    """One launch being carried out.

    Attributes
    ----------
    rows
        Its rows, as they were when it was issued.
    turn
        How many launches of the stage came before: the place in a ring is ``turn`` modulo its buffers.
    num_bytes
        Bytes that its copies and kernels counted, for the trace.
    """

    launch: Launch
    rows: tuple[Row, ...]
    turn: int
    num_bytes: float = 0.0

    @property
    def layer(self) -> int:
        """The launch's layer."""
        assert self.launch.layer is not None
        return self.launch.layer

    @property
    def stage(self) -> Stage:
        """The launch's stage."""
        return self.launch.stage

    @property
    def where(self) -> str:
        """The launch for messages."""
        layer = "" if self.launch.layer is None else f"layer {self.launch.layer}, "
        return f"stage {self.stage.name!r}, {layer}block {self.launch.block}"

    def reads(self, pool: str, region: Region = Region.WHOLE, buffer: Buffer = Buffer.ONE) -> bool:
        """Whether the stage declares this read."""
        return any((a.pool, a.region, a.buffer) == (pool, region, buffer) for a in self.stage.reads)

    def writes(self, pool: str, region: Region = Region.WHOLE, buffer: Buffer = Buffer.ONE) -> bool:
        """Whether the stage declares this write, for all of its rows or for some."""
        declared = (*self.stage.writes, *self.stage.drafts, *self.stage.completes)
        return any((a.pool, a.region, a.buffer) == (pool, region, buffer) for a in declared)

    def require(self, declared: bool, what: str) -> None:
        """Refuse an access that the description does not declare: the hazard check would not know of it."""
        if not declared:
            raise PipelineError(f"{self.where}: {what} is not among the accesses that the stage declares")


OnBlock = Callable[[int, list[int]], bool]
"""Told of a request's completed block, in the main stream's thread: request id and the answer's new tokens.

Returns whether the answer ends with it (a stop word was found).
"""


@dataclass(slots=True)
class Session:
    """Model, pools and rows of a run. ``passes`` holds what a layer-by-layer pass carries, one entry a stream.

    ``threads`` is how many the CPU kernels may use; ``None`` is all. ``synthetic`` fills a prompt's KV with seeded
    random numbers instead of computing it (speed runs at long contexts). ``path`` says how the device carries
    actions out, for the result. ``rows_together`` is how many rows a forward or a retrieval pass has at
    most, where that is fewer than there are slots; 0: all of them.
    """

    pipeline: Pipeline
    model: BlockModel
    pools: Pools
    state: RowState
    policy: Policy
    eos: tuple[int, ...]
    threads: int | None = None
    synthetic: bool = False
    seed: int = 0
    on_block: OnBlock | None = None
    path: str = "plain"
    rows_together: int = 0
    passes: dict[str, Any] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    sights: dict[bool, torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows_together = self.rows_together or self.pools.slots

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def block_length(self) -> int:
        """B."""
        return self.pipeline.settings.block_length

    @property
    def full_batches(self) -> tuple[int, ...]:
        """Rows of a forward while every slot is decoded: where two halves take turns, the second may have one less."""
        full = self.rows_together
        return tuple(dict.fromkeys((full, self.pools.slots - full or full)))

    @property
    def window(self) -> int:
        """W, positions that a forward computes of a row: B, or more where tokens may be committed ahead."""
        return self.pipeline.settings.window_length

    def sight(self, completing: bool) -> torch.Tensor | None:
        """What a window's positions see of one another (:mod:`herald_exec.windows`); ``None``: everything."""
        settings = self.pipeline.settings
        if settings.window_blocks == 1:
            return None
        if completing not in self.sights:
            period = settings.block_length if completing else None
            trained = self.model.shape.block_length
            self.sights[completing] = window_mask(settings.window_length, trained, period, device=self.device)
        return self.sights[completing]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.model.shape.num_layers

    @property
    def double_buffered(self) -> bool:
        """Whether the sparse pool has an idle buffer."""
        return "sparse" in self.pools.stores and self.pools.stores["sparse"].buffers == 2

    def entry_bytes(self, host: bool = False) -> int:
        """Bytes of one position's K and V in one layer, as the description counts them."""
        settings = self.pipeline.settings
        dtype = settings.dram_kv_dtype if host else settings.kv_dtype
        return round(self.model.shape.kv_bytes_per_token_layer(dtype))


Action = Callable[[Session, Task], Any]
"""Carries out one launch; a deciding one returns what it found."""

ACTIONS: dict[str, Action] = {}
"""Stage action -> function. Filled by :func:`action` when the modules of the package are imported."""


def action(name: str) -> Callable[[Action], Action]:
    """Register the function that carries out stages with this ``action``."""

    def register(function: Action) -> Action:
        if name in ACTIONS:
            raise ValueError(f"action {name!r} is registered twice")
        ACTIONS[name] = function
        return function

    return register


def bind(pipeline: Pipeline, own: Mapping[str, Action] | None = None) -> dict[str, Action]:
    """Stage name -> function, for every stage; an action that nothing carries out is refused before the run.

    ``own`` are a device's actions, which take precedence.
    """
    bound, known = {}, {**ACTIONS, **(own or {})}
    for stage in pipeline.template.stages():
        if stage.action not in known:
            raise PipelineError(
                f"stage {stage.name!r} of {pipeline.method.name} has action {stage.action!r}, which the executor does "
                f"not know{did_you_mean(stage.action, known)}"
            )
        bound[stage.name] = known[stage.action]
    return bound


def queries_per_row(task: Task) -> int:
    """x: tokens a row that the stage projects, as its work says."""
    for repeat in task.stage.work(task.launch.shape, task.launch.layer):
        for op in repeat.ops:
            if op.kind is OpKind.QKV:
                return op.tokens // task.launch.shape.rows
    raise RunError(f"{task.where}: the stage's work has no projection")
