"""What is measured of a sliding window, and a cell's figures. Fixed before the first run: every cell is reported."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herald_exec.evaluation.decoding_grid import mean_interval
from herald_exec.evaluation.plan import RETRIEVAL_TASKS, StudyPlan, check_study, study_facts, study_row
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.resuming import read_done
from herald_exec.evaluation.rules import Rule, get_rule
from herald_exec.evaluation.sliding import Slid, Slide, Sliding
from herald_exec.models.base import BlockModel
from herald_exec.reference.tasks import Material, Sample, draw_samples
from herald_pipeline.errors import ConfigError

FIRST_SEED = 40_000
"""Seeds that no other plan uses."""
Key = tuple[str, str, float, str, int]
"""Slide, rule, budget, task, context."""
Rules = tuple[tuple[str, tuple[float, ...]], ...]

_BUDGETS = (0.05, 0.10, 0.20)
_ALL: Rules = (("dense", (1.0,)), ("herald", _BUDGETS), ("herald-32q", _BUDGETS))
_AT_10: Rules = (("dense", (1.0,)), ("herald", (0.10,)), ("herald-32q", (0.10,)))
_READINGS: Rules = (("dense", (1.0,)), ("herald", (0.10,)))
LONG = ("multi", "log", "rec")
"""Tasks with answers of several blocks."""
SHORT = tuple(task for task in RETRIEVAL_TASKS if task not in LONG)


@dataclass(frozen=True, slots=True)
class Group:
    """Slides x rules x tasks. Its tasks go one by one, so that prompts are prefilled once for all slides and rules."""

    slides: tuple[Slide, ...]
    rules: Rules
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlidingPlan:
    """Groups in order, the most wanted first, at every context."""

    groups: tuple[Group, ...]
    contexts: tuple[int, ...]
    samples: int
    threshold: float = 0.95
    first_seed: int = FIRST_SEED

    def cells(self) -> Iterator[tuple[Slide, str, float, str, int]]:
        """Slide, rule, budget, task and context of each cell, each once."""
        seen = set()
        for context in self.contexts:
            for group in self.groups:
                for task in group.tasks:
                    for slide in group.slides:
                        for rule, budgets in group.rules:
                            for budget in budgets:
                                cell = (slide, rule, budget, task, context)
                                if cell not in seen:
                                    seen.add(cell)
                                    yield cell


FIXED, EIGHT = Slide(32, 32), Slide(8, 32)
PLAN = SlidingPlan(
    groups=(
        Group((FIXED, EIGHT), _ALL, LONG),
        Group((FIXED, EIGHT), _ALL, SHORT),
        Group((Slide(16, 32), Slide(32, 64)), _AT_10, LONG),
        Group((Slide(8, 32, clean="window"), Slide(8, 32, sight="stride")), _READINGS, LONG),
    ),
    contexts=(4096,),
    samples=200,
)
"""For a GPU: fixed blocks (HERALD) against a slide of a quarter; two other shapes and two other readings at 10%."""
REDUCED = SlidingPlan(
    groups=(
        Group((FIXED, EIGHT), (("dense", (1.0,)), ("herald", (0.05, 0.20)), ("herald-32q", (0.05,))), ("multi", "log")),
        Group((Slide(16, 32), Slide(32, 64)), (("dense", (1.0,)),), ("multi", "log")),
    ),
    contexts=(1024,),
    samples=20,
)
"""For two CPU cores."""


def check_plan(plan: SlidingPlan) -> None:
    """Every name and number of a plan, before anything is loaded."""
    for group in plan.groups:
        check_study(
            StudyPlan(group.rules, group.tasks, plan.contexts, plan.samples, plan.threshold, plan.first_seed),
        )


def parse_slide(text: str) -> Slide:
    """``8/32`` as R = 8, W = 32; with the reading behind it where it is another: ``8/32 clean=window``."""
    shape, *reading = text.split()
    stride, _, window = shape.partition("/")
    options = dict(part.partition("=")[::2] for part in reading)
    if not (stride.isdecimal() and window.isdecimal()) or not options.keys() <= {"clean", "sight"}:
        message = f"--slide {text!r}: give stride/window, for example 8/32, or '8/32 clean=window'"
        raise ConfigError(message)
    return Slide(int(stride), int(window), **options)


def sliding_key(row: Mapping[str, Any]) -> Key:
    """Which cell of a plan a row is."""
    return row["slide"], row["rule"], row["budget"], row["task"], row["context"]


def read_sliding(path: Path, facts: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Cells that a file holds already (:func:`herald_exec.evaluation.resuming.read_done`)."""
    return read_done(path, facts, sliding_key, "a sliding run")


def sliding_facts(model: BlockModel, plan: SlidingPlan) -> dict[str, Any]:
    """What cells of one file must share."""
    return study_facts(model, StudyPlan((), (), plan.contexts, plan.samples, plan.threshold, plan.first_seed))


def sliding_row(
    slide: Slide, rule: Rule, budget: float, samples: list[Sample], found: Slid, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """A study's cell, and what it takes a token: forwards, positions computed, retrievals, bytes read.

    An answer's tokens include its end token. ``ahead`` is the share of periods that were complete before their step.
    """
    row = study_row(rule, budget, samples, found, decode)
    tokens = [
        min(len(answer) + 1, len(steps) * slide.stride)
        for answer, steps in zip(found.answers, found.steps, strict=True)
    ]
    forwards = [sum(steps) + len(steps) for steps in found.steps]
    total = sum(tokens)
    for entry, count in zip(row["raw"], tokens, strict=True):
        entry["tokens"] = count
    return {
        "slide": slide.name,
        **row,
        "tokens": total / len(samples),
        "forwards_per_token": mean_interval([f / t for f, t in zip(forwards, tokens, strict=True)]),
        "positions_per_token": slide.window * sum(forwards) / total,
        "selections_per_token": row["selections"] / total,
        "scan_bytes_per_token": row["scan_bytes"] / total,
        "ahead": sum(found.ahead) / sum(len(steps) for steps in found.steps),
    }


def run_sliding(
    model: BlockModel,
    material: Material,
    plan: SlidingPlan,
    *,
    part: tuple[int, int] = (1, 1),
    done: Mapping[Key, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Cells of a plan in order, with the seconds that each took; all see the same samples.

    ``part`` (i, n) takes every n-th cell from the i-th on; cells of ``done`` are not run again.
    """
    check_plan(plan)
    facts, (number, parts) = sliding_facts(model, plan), part
    prompts: Prompts | None = None
    for at, (slide, name, budget, task, context) in enumerate(plan.cells()):
        if at % parts != number - 1 or (slide.name, name, budget, task, context) in (done or {}):
            continue
        if prompts is None or (prompts.task, prompts.context) != (task, context):
            # The last task's KV must be free before the next is computed.
            del prompts
            prompts = Prompts(model, list(draw_samples(material, task, context, plan.samples, plan.first_seed)))
        started = time.perf_counter()
        rule = get_rule(name)
        found = Sliding(prompts, rule, budget, slide, threshold=plan.threshold).run()
        row = sliding_row(slide, rule, budget, prompts.samples, found, material.encoder.decode)
        yield facts | row | {"seconds": round(time.perf_counter() - started, 3)}
