"""Accuracy of the reference model by method, budget, task and context, decoded by the executor itself.

The plan (:data:`PLAN`) was fixed before its first run: every cell of it is reported, none is left out.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from herald_exec.execution import Options, decode
from herald_exec.models.base import BlockModel
from herald_exec.policy import RulePolicy
from herald_exec.pools import TORCH_DTYPES
from herald_exec.reference.scoring import score_sample, wilson_interval
from herald_exec.reference.tasks import MAX_ANSWER_TOKENS, TASKS, Material, Sample, draw_samples
from herald_exec.requests import DecodeRequest
from herald_pipeline import pipeline as pipelines
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import check_number, raise_problems, unknown_name
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.scheduling.program import BatchPolicy

FIRST_SEED = 10_000
"""Seeds of the plan start here; trials use smaller ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: ``methods`` are (method, budgets); an empty tuple of budgets is the method's own default."""

    methods: tuple[tuple[str, tuple[float, ...]], ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    samples: int
    threshold: float = 0.95
    first_seed: int = FIRST_SEED

    def cells(self) -> Iterator[tuple[str, float | None, str, int]]:
        """Method, budget, task and context of each cell."""
        for context in self.contexts:
            for task in self.tasks:
                for method, budgets in self.methods:
                    for budget in budgets or (None,):
                        yield method, budget, task, context


PLAN = Plan(
    methods=(
        ("dense", ()),
        ("mage-offload", (0.01, 0.025, 0.05, 0.10)),
        ("infinigen", (0.025, 0.05, 0.10, 0.20)),
        ("herald", (0.01, 0.025, 0.05, 0.10)),
        ("herald-32q", (0.05,)),
        ("herald-no-draft", (0.05,)),
    ),
    tasks=tuple(task for task in TASKS if task != "arith"),
    contexts=(4096,),
    samples=200,
)
"""Counterpart of the paper's Table I. ``arith`` is left out: it needs nothing of the context."""

REDUCED = Plan(
    methods=(("dense", ()), ("mage-offload", (0.05,)), ("herald", (0.05,))),
    tasks=("kv", "log", "rec"),
    contexts=(512,),
    samples=8,
)
"""For two CPU cores."""


def describe(model: BlockModel, method: str, budget: float | None) -> Pipeline:
    """The method for the model, with KV stored as the model computes it."""
    kv = next(name for name, dtype in TORCH_DTYPES.items() if dtype is model.kv_dtype)
    changes: dict[str, Any] = {"block_length": model.shape.block_length, "kv_dtype": kv, "dram_kv_dtype": kv}
    if budget is not None:
        changes["budget"] = budget
    return pipelines.build(model.shape, method, **changes)


def run_cell(
    model: BlockModel,
    material: Material,
    method: str,
    budget: float | None,
    samples: Sequence[Sample],
    *,
    threshold: float = 0.95,
    batch: int = 8,
    threads: int | None = None,
) -> dict[str, Any]:
    """One method at one budget on samples of one task and context.

    Returns
    -------
    dict
        Exact and partial score with 95% intervals, T (denoising steps a block), blocks an answer, NFE (forwards of a
        request, completing ones included), bytes and seconds of the run, and the raw answers.
    """
    pipeline = describe(model, method, budget)
    requests = [
        DecodeRequest(number, sample.prompt, MAX_ANSWER_TOKENS[sample.task]) for number, sample in enumerate(samples)
    ]
    policy = RulePolicy(
        acceptance.get("confidence", threshold=threshold), Sampler(mask_token_id=model.shape.mask_token_id)
    )
    options = Options(batch=min(batch, len(requests)), policy=BatchPolicy.FIRST_DONE_FIRST_OUT, threads=threads)
    started = time.perf_counter()
    run = decode(pipeline, model, requests, policy=policy, options=options)
    seconds = time.perf_counter() - started
    texts = [material.encoder.decode(run.answers[request.id]) for request in requests]
    scores = [score_sample(sample, text) for sample, text in zip(samples, texts, strict=True)]
    blocks = [len(steps) for request in requests for steps in run.commits[request.id]]
    count = len(samples)
    return {
        "method": method,
        "budget": pipeline.settings.budget,
        "queries": pipeline.settings.queries,
        "task": samples[0].task,
        "context": samples[0].context,
        "threshold": threshold,
        "samples": count,
        "exact": wilson_interval(sum(score.exact for score in scores), count)._asdict(),
        "partial": wilson_interval(sum(score.partial for score in scores), count)._asdict(),
        "steps_per_block": sum(blocks) / len(blocks),
        "blocks_per_answer": len(blocks) / count,
        "nfe": (sum(blocks) + len(blocks)) / count,
        "seconds": seconds,
        "raw": [
            {"seed": sample.seed, "answer": text, "exact": score.exact, "partial": score.partial}
            for sample, text, score in zip(samples, texts, scores, strict=True)
        ],
    }


def check_plan(plan: Plan) -> None:
    """Every number of a plan, before anything is loaded."""
    problems = [check_number(plan.samples, "samples", minimum=1, integer=True)]
    problems += [check_number(plan.threshold, "threshold", minimum=0, maximum=1)]
    for _, budgets in plan.methods:
        problems += [check_number(budget, "budget", above=0, maximum=1) for budget in budgets]
    raise_problems(problems)
    for task in plan.tasks:
        if task not in TASKS:
            raise unknown_name(kind="task", name=task, valid=TASKS)


def run_grid(
    model: BlockModel, material: Material, plan: Plan, *, batch: int = 8, threads: int | None = None
) -> Iterator[dict[str, Any]]:
    """Every cell of a plan, in order; all methods see the same samples."""
    check_plan(plan)
    for method, budget, task, context in plan.cells():
        samples = list(draw_samples(material, task, context, plan.samples, plan.first_seed))
        yield run_cell(model, material, method, budget, samples, threshold=plan.threshold, batch=batch, threads=threads)
