"""What the accuracy study runs. Fixed before its first run: every cell is reported, none is left out."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herald_exec.evaluation.grid import FIRST_SEED
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.resuming import read_done, weights_digest
from herald_exec.evaluation.rules import RULES, Rule, get_rule
from herald_exec.evaluation.study import Answered, Study
from herald_exec.models.base import BlockModel
from herald_exec.reference.scoring import score_sample, wilson_interval
from herald_exec.reference.tasks import MIN_CONTEXT, TASKS, Material, Sample, draw_samples
from herald_pipeline.errors import check_number, raise_problems, unknown_name

Key = tuple[str, float, str, int]
"""Rule, budget, task, context."""
RETRIEVAL_TASKS = tuple(task for task in TASKS if task != "arith")
"""``arith`` is left out: it needs nothing of the context."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """``rules`` are (rule, budgets); cells go task by task, so that prompts are prefilled once for all rules."""

    rules: tuple[tuple[str, tuple[float, ...]], ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    samples: int
    threshold: float = 0.95
    first_seed: int = FIRST_SEED

    def cells(self) -> Iterator[Key]:
        """Rule, budget, task and context of each cell, in order."""
        for context in self.contexts:
            for task in self.tasks:
                for name, budgets in self.rules:
                    for budget in budgets:
                        yield name, budget, task, context


_WIDE = (0.01, 0.025, 0.05, 0.10)
_FRONT = (0.025, 0.05, 0.10)
_OPTIONS = tuple(name for name in RULES if name.startswith("herald-"))

FULL = StudyPlan(
    rules=(
        ("dense", (1.0,)),
        ("mage-offload", _WIDE),
        ("infinigen", (0.025, 0.05, 0.10, 0.20)),
        ("herald", (*_WIDE, 0.20, 0.40)),
        ("representative", _FRONT),
        *((name, _FRONT) for name in _OPTIONS),
        ("recency", (0.05, 0.10)),
        ("random", (0.05, 0.10)),
    ),
    tasks=RETRIEVAL_TASKS,
    contexts=(4096,),
    samples=200,
)
"""Table I's counterpart and the cost front, for a GPU."""

REDUCED = StudyPlan(
    rules=(
        ("dense", (1.0,)),
        ("mage-offload", (0.05,)),
        ("infinigen", (0.05,)),
        ("herald", (0.05, 0.10)),
        ("herald-4q", (0.05,)),
        ("herald-32q", (0.05,)),
        ("herald-int8", (0.05,)),
        ("recency", (0.05,)),
        ("random", (0.05,)),
    ),
    tasks=("kv", "multi", "log"),
    contexts=(512,),
    samples=12,
)
"""For two CPU cores."""


def check_study(plan: StudyPlan) -> None:
    """Every name and number of a plan, before anything is loaded."""
    problems = [
        check_number(plan.samples, "samples", minimum=1, integer=True),
        check_number(plan.threshold, "threshold", minimum=0, maximum=1),
        *(check_number(context, "context", minimum=MIN_CONTEXT, integer=True) for context in plan.contexts),
        *(check_number(budget, "budget", above=0, maximum=1) for _, budgets in plan.rules for budget in budgets),
    ]
    raise_problems(problems)
    for name, _ in plan.rules:
        get_rule(name)
    for task in plan.tasks:
        if task not in TASKS:
            raise unknown_name(kind="task", name=task, valid=TASKS)


def study_row(
    rule: Rule, budget: float, samples: list[Sample], found: Answered, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """A cell's scores with 95% intervals, T, NFE, retrieval cost, and the raw answers."""
    texts = [decode(answer) for answer in found.answers]
    scores = [score_sample(sample, text) for sample, text in zip(samples, texts, strict=True)]
    blocks = [taken for row in found.steps for taken in row]
    count = len(samples)
    return {
        "rule": rule.name,
        "budget": budget,
        "queries": rule.queries,
        "task": samples[0].task,
        "context": samples[0].context,
        "samples": count,
        "exact": wilson_interval(sum(score.exact for score in scores), count)._asdict(),
        "partial": wilson_interval(sum(score.partial for score in scores), count)._asdict(),
        "steps_per_block": sum(blocks) / len(blocks),
        "blocks_per_answer": len(blocks) / count,
        "nfe": (sum(blocks) + len(blocks)) / count,
        "scan_bytes": sum(found.scan_bytes),
        "selections": sum(found.selections),
        "raw": [
            {"seed": sample.seed, "answer": text, "exact": score.exact, "partial": score.partial, "steps": steps}
            for sample, text, score, steps in zip(samples, texts, scores, found.steps, strict=True)
        ],
    }


def study_facts(model: BlockModel, plan: StudyPlan) -> dict[str, Any]:
    """What cells of one file must share; ``weights`` tells trainings apart."""
    return {
        "model": model.shape.name,
        "weights": weights_digest(model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threshold": plan.threshold,
        "samples": plan.samples,
        "first_seed": plan.first_seed,
    }


def read_study(path: Path, facts: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Cells that a study's file holds already (:func:`herald_exec.evaluation.resuming.read_done`)."""
    return read_done(path, facts, study_key, "a study")


def study_key(row: Mapping[str, Any]) -> Key:
    """Which cell of a plan a row is."""
    return row["rule"], row["budget"], row["task"], row["context"]


def run_study(
    model: BlockModel,
    material: Material,
    plan: StudyPlan,
    *,
    part: tuple[int, int] = (1, 1),
    done: Mapping[Key, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Cells of a plan in order, with the seconds that each took; all rules see the same samples.

    Parameters
    ----------
    part
        (i, n): every n-th cell beginning with the i-th, so that n machines share a plan evenly.
    done
        Cells that are not run again (:func:`read_study`).
    """
    check_study(plan)
    facts = study_facts(model, plan)
    number, parts = part
    todo = [key for at, key in enumerate(plan.cells()) if at % parts == number - 1 and key not in (done or {})]
    prompts: Prompts | None = None
    for name, budget, task, context in todo:
        if prompts is None or (prompts.task, prompts.context) != (task, context):
            # The last task's KV must be free before the next is computed.
            del prompts
            prompts = Prompts(model, list(draw_samples(material, task, context, plan.samples, plan.first_seed)))
        started = time.perf_counter()
        rule = get_rule(name)
        found = Study(prompts, rule, budget, threshold=plan.threshold).run()
        row = study_row(rule, budget, prompts.samples, found, material.encoder.decode)
        yield facts | row | {"seconds": round(time.perf_counter() - started, 3)}
