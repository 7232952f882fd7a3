"""Points of comparison: a method at a context and a batch; which ones a fit may see, which ones judge it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.conditions import Conditions, check, settings
from herald_pipeline import methods
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.workload import Workload

FIT, HELD_OUT = "fit", "held-out"
DEFAULT_STEPS = 4
DEFAULT_BLOCKS = 3
"""Blocks of a request: the first is not counted."""
_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration. ``set`` says whether a fit may see it; ``kv_dtype`` is the format in both memories.

    ``conditions`` are changes of the machine that the run met (:mod:`calibration.conditions`).
    """

    method: str
    context: int
    batch: int
    steps: int = DEFAULT_STEPS
    blocks: int = DEFAULT_BLOCKS
    block_length: int = 32
    kv_dtype: str = "fp32"
    budget: float | None = None
    set: str = HELD_OUT
    conditions: Conditions = ()

    def __post_init__(self) -> None:
        where = f"point {self.method} {self.context}x{self.batch}"
        problems = [
            check_number(self.context, f"{where}: context", minimum=0, integer=True),
            check_number(self.batch, f"{where}: batch", minimum=1, integer=True),
            check_number(self.steps, f"{where}: steps", minimum=1, integer=True),
            check_number(self.blocks, f"{where}: blocks", minimum=2, integer=True),
            check_number(self.block_length, f"{where}: block_length", minimum=1, integer=True),
        ]
        if self.set not in (FIT, HELD_OUT):
            problems.append(f"{where}: set must be {FIT!r} or {HELD_OUT!r}, got {self.set!r}")
        raise_problems(problems)
        check(self.conditions)

    @property
    def name(self) -> str:
        """What a table calls it."""
        changed = "".join(f", {name} {value}" for name, value in self.conditions)
        return f"{self.method} {self.context} x {self.batch}{changed}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two runs the same configuration."""
        same = (self.method, self.context, self.batch, self.steps, self.block_length, self.kv_dtype, self.budget)
        return (*same, self.conditions)

    def pipeline(self, shape: ModelShape) -> Pipeline:
        """The description that both interpreters run."""
        changes: dict[str, Any] = {
            "block_length": self.block_length,
            "kv_dtype": self.kv_dtype,
            "dram_kv_dtype": self.kv_dtype,
        }
        changes |= settings(self.conditions)
        if self.budget is not None:
            changes["budget"] = self.budget
        default = methods.get(self.method).defaults
        if default.queries == default.block_length:
            changes["queries"] = self.block_length
        return build(shape, self.method, **changes)

    def workload(self) -> Workload:
        """The requests, all alike and at once."""
        return Workload.uniform(
            self.context,
            self.batch,
            gen_tokens=self.blocks * self.block_length,
            block_length=self.block_length,
            steps=self.steps,
            policy=str(dict(self.conditions).get("policy", BatchPolicy.LOCKSTEP)),
        )


_APART = {"steps": "T {}", "budget": "budget {}", "block_length": "block {}", "kv_dtype": "KV in {}"}


def names(points: Sequence[Point]) -> list[str]:
    """What a table of these points calls each: its name, and what tells it from others of that name."""
    alike: dict[str, list[Point]] = {}
    for point in points:
        alike.setdefault(point.name, []).append(point)

    called = []
    for point in points:
        told = [point.name]
        for field, text in _APART.items():
            if len({getattr(other, field) for other in alike[point.name]}) > 1:
                value = getattr(point, field)
                told.append(text.format("of the method" if value is None else value))
        called.append(", ".join(told))
    return called


def default_points() -> tuple[Point, ...]:
    """The demonstration's points: Dense at four corners to fit, eleven to judge, HERALD never fitted.

    HERALD's runs are a block longer: a block has one retrieval pass and many forwards, and the last block has none, so
    in three blocks an upload would be timed twice.
    """
    corners = ((256, 1), (256, 2), (2048, 1), (2048, 2))
    fitted = [Point("dense", context, batch, set=FIT) for context, batch in corners]
    others = ((1024, 1), (4096, 1), (512, 2), (512, 4), (1024, 4))
    dense = [Point("dense", context, batch) for context, batch in others]
    sizes = ((512, 1), (1024, 2), (2048, 1), (2048, 4), (4096, 2), (8192, 1))
    herald = [Point("herald", context, batch, blocks=DEFAULT_BLOCKS + 1) for context, batch in sizes]
    return (*fitted, *dense, *herald)


def check_held_out(points: Iterable[Point]) -> None:
    """Refuse a held-out point that is too much like a fitted one, and a comparison without a method never fitted.

    Raises
    ------
    ConfigError
        Naming each point that differs by less than a factor of two in context and batch.
    """
    known = list(points)
    fitted = [point for point in known if point.set == FIT]
    if not fitted:
        return
    problems = [
        f"{point.name} is held out, but within a factor of {_FACTOR} of the fitted {near.name} in context and batch"
        for point in known
        if point.set == HELD_OUT
        for near in fitted
        if near.method == point.method and not _apart(point, near)
    ]
    if not {point.method for point in known} - {point.method for point in fitted}:
        problems.append("every method is fitted; hold one out whole, or the comparison says nothing of new methods")
    if problems:
        raise ConfigError(problems)


def _apart(one: Point, other: Point) -> bool:
    def ratio(a: int, b: int) -> float:
        return max(a, b) / max(min(a, b), 1)

    return ratio(one.context, other.context) >= _FACTOR or ratio(one.batch, other.batch) >= _FACTOR


def from_row(row: Mapping[str, Any]) -> Point:
    """Point of a line of a table of runs; what the line leaves open has its default."""
    given: dict[str, Any] = {
        name: int(row[name]) for name in ("steps", "blocks", "block_length") if row.get(name) not in (None, "")
    }
    given |= {name: str(row[name]) for name in ("kv_dtype", "set") if row.get(name)}
    if row.get("budget") not in (None, ""):
        given["budget"] = float(row["budget"])
    return Point(str(row["method"]), int(row["context"]), int(row["batch"]), **given)
