"""What DSB's half of the evaluation runs: decoder x scheduler x cache, and sweeps of one factor at a time.

The plans were fixed before their first run: every cell is reported, none is left out. A task is a numbered list of
questions, answered in one response: ``few`` asks one or two of them, ``many`` three to six. Prompts of the length sweep
are asked for answers that fit the shortest response, so that nothing but the response's length varies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from json import dumps
from typing import Any

from herald_exec.reference.lists import MIN_PROMPT, MIN_RESPONSE
from herald_pipeline.decoding.caches import LLADA_PREFIX_WINDOW
from herald_pipeline.decoding.policy import MASKED_DIFFUSION_THRESHOLD, DecodingPolicy, make_policy
from herald_pipeline.errors import check_number, raise_problems, unknown_name

TASKS = {"few": (1, 2), "many": (3, 6)}
"""Fewest and most questions of a task's lists."""
FIRST_SEED = 30_000
"""Seeds of the plans start here; trials use smaller ones."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One choice of everything, asked of one task.

    ``s_init`` is B of blocks that do not slide; ``s_max`` None is unbounded. ``p_min``, ``suffix``: windows of the dsb
    cache, in positions left and right of the block. ``fits``: answers are drawn to fit a response of so many tokens.
    ``diagnose`` counts late and premature rounds; such a cell is not timed, because the diagnosis is not free.
    """

    decoder: str = "confidence"
    scheduler: str = "fixed"
    cache: str = "none"
    s_init: int = 32
    s_max: int | None = None
    p_min: int = LLADA_PREFIX_WINDOW
    suffix: int = 0
    response: int = 256
    fits: int = 256
    diagnose: bool = False
    task: str = "few"

    def policy(self, threshold: float) -> DecodingPolicy:
        """The cell's decoding policy; refuses what does not go together."""
        size = "s_init" if self.scheduler.startswith("dsb") else "block"
        blocks: dict[str, Any] = {size: self.s_init}
        if self.scheduler == "dsb-greedy":
            blocks["s_max"] = self.s_max
        return make_policy(
            self.decoder,
            self.scheduler,
            self.cache,
            steps=self.s_init,
            decoder_params={"threshold": threshold} if self.decoder == "confidence" else {},
            scheduler_params=blocks,
            cache_params={"prefix_window": self.p_min, "suffix_window": self.suffix} if self.cache == "dsb" else {},
        )

    def work(self, prompt_tokens: int) -> float:
        """About how much a sample costs, in positions computed: what shares a plan among devices, and nothing else.

        One forward a token, or about one for ten; caches leave the shares of positions that follow from their rules.
        """
        forwards = self.response if self.decoder == "top1" else self.response / 10
        kept = {"none": 1.0, "prefix": 0.5, "dkv": 0.5}.get(self.cache, 0.25)
        return forwards * kept * (prompt_tokens + self.response) * (2 if self.diagnose else 1)

    @property
    def base(self) -> "Cell":
        """What the cell is compared with: fixed blocks of 32 without a cache, on the same samples."""
        return Cell(response=self.response, fits=self.fits, task=self.task)


@dataclass(frozen=True, slots=True)
class Plan:
    """Groups of cells (without their task), each asked of every task.

    ``samples`` a cell, ``ratio_samples`` of a diagnosed one.
    """

    name: str
    groups: tuple[tuple[str, tuple[Cell, ...]], ...]
    tasks: tuple[str, ...]
    samples: int
    ratio_samples: int
    prompt_tokens: int = MIN_PROMPT
    threshold: float = MASKED_DIFFUSION_THRESHOLD
    first_seed: int = FIRST_SEED

    def cells(self) -> Iterator[tuple[Cell, tuple[str, ...]]]:
        """Every cell once, with the groups that it belongs to; group by group, and a base before what it is for."""
        found: dict[Cell, list[str]] = {}
        for name, part in self.groups:
            for cell in (replace(cell, task=task) for cell in part for task in self.tasks):
                found.setdefault(cell.base, [])
                found.setdefault(cell, []).append(name)
        for cell, names in found.items():
            yield cell, tuple(dict.fromkeys(names)) or ("base",)

    def part(self, number: int, parts: int) -> list[tuple[Cell, tuple[str, ...]]]:
        """The cells of part ``number`` of ``parts`` (from 1 on), about equal in work, in the plan's order.

        A base is in every part that compares something with it, so that speeds are compared on one device.
        """
        cells = list(self.cells())
        load, mine = [0.0] * parts, set()
        for cell, _ in sorted(cells, key=lambda item: -item[0].work(self.prompt_tokens)):
            least = load.index(min(load))
            load[least] += cell.work(self.prompt_tokens)
            if least == number - 1:
                mine |= {cell, cell.base}
        return [(cell, groups) for cell, groups in cells if cell in mine]

    @property
    def fingerprint(self) -> str:
        """Differs whenever anything of the plan does."""
        return sha256(dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def _grid(decoders: Iterable[str], schedulers: Iterable[str], caches: Sequence[str]) -> tuple[Cell, ...]:
    names = list(schedulers)
    return tuple(Cell(d, s, c) for d in decoders for s in names for c in caches)


_SCHEDULERS = ("fixed", "adablock", "dsb-const", "dsb-greedy")
_CACHES = ("none", "prefix", "dual", "dkv", "dsb")
_SYSTEMS = (Cell(), Cell(cache="dual"), Cell(scheduler="dsb-greedy"), Cell(scheduler="dsb-greedy", cache="dsb"))
_GREEDY = Cell(scheduler="dsb-greedy", cache="dsb")

PLAN = Plan(
    name="full",
    groups=(
        ("grid", _grid(("confidence",), _SCHEDULERS, _CACHES)),
        ("grid", _grid(("top1",), ("fixed", "dsb-greedy"), ("none", "dual", "dsb"))),
        ("cache-under-dsb", _grid(("confidence",), ("dsb-const", "dsb-greedy"), ("dual", "dsb"))),
        (
            "ratios",
            tuple(replace(c, diagnose=True) for c in (*_grid(("confidence",), _SCHEDULERS, ("none",)), _GREEDY)),
        ),
        ("s_init", tuple(replace(c, s_init=n) for n in (16, 32, 48, 64) for c in _SYSTEMS)),
        ("length", tuple(replace(c, response=n, fits=128) for n in (128, 256, 512, 1024) for c in _SYSTEMS)),
        (
            "s_max",
            tuple(
                Cell(scheduler="dsb-greedy", cache=cache, s_max=n)
                for cache in ("none", "dsb")
                for n in (32, 48, 64, 80, 96, None)
            ),
        ),
        (
            "p_min",
            tuple(
                Cell(scheduler=scheduler, cache="dsb", p_min=n)
                for scheduler in ("dsb-const", "dsb-greedy")
                for n in (0, 4, 8, 16, 24, 32)
            ),
        ),
        ("suffix", tuple(replace(_GREEDY, suffix=n) for n in (0, 4, 8, 16, 24, 32))),
        ("grid", _grid(("entropy",), _SCHEDULERS, _CACHES)),
    ),
    tasks=("few", "many"),
    samples=200,
    ratio_samples=50,
)
"""One GPU; what the article's tables show comes first, so that a run cut short holds it."""


def _short(*cells: Cell) -> tuple[Cell, ...]:
    return tuple(replace(cell, response=96, fits=96) for cell in cells)


REDUCED = Plan(
    name="reduced",
    groups=(
        ("grid", _short(Cell("top1"), *(Cell(scheduler=name) for name in _SCHEDULERS))),
        ("grid", _short(Cell(cache="prefix"), Cell(cache="dual"), Cell(cache="dkv"))),
        ("s_init", _short(replace(_GREEDY, s_init=16), _GREEDY, replace(_GREEDY, s_init=64))),
        ("s_max", _short(*(replace(_GREEDY, s_max=n) for n in (32, 64, None)))),
        ("p_min", _short(*(replace(_GREEDY, p_min=n) for n in (0, 24)))),
        ("suffix", _short(*(replace(_GREEDY, suffix=n) for n in (0, 32)))),
        ("cache-under-dsb", _short(*_grid(("confidence",), ("dsb-const", "dsb-greedy"), ("dual", "dsb")))),
        ("ratios", _short(Cell(diagnose=True), Cell(scheduler="dsb-greedy", diagnose=True))),
    ),
    tasks=("few",),
    samples=4,
    ratio_samples=4,
)
"""Two CPU cores. So few samples show that everything runs, and what a large effect is; nothing finer."""


def check_plan(plan: Plan) -> None:
    """Every number and name of a plan, before anything is loaded."""
    problems = [
        check_number(plan.samples, "samples", minimum=1, integer=True),
        check_number(plan.ratio_samples, "ratio_samples", minimum=1, integer=True),
        check_number(plan.prompt_tokens, "prompt_tokens", minimum=MIN_PROMPT, integer=True),
        check_number(plan.first_seed, "first_seed", minimum=0, integer=True),
    ]
    for cell, _ in plan.cells():
        problems += [
            check_number(cell.fits, "fits", minimum=MIN_RESPONSE, maximum=cell.response, integer=True),
        ]
    raise_problems(problems)
    for task in plan.tasks:
        if task not in TASKS:
            raise unknown_name(kind="task", name=task, valid=TASKS)
    for cell, _ in plan.cells():
        cell.policy(plan.threshold)
