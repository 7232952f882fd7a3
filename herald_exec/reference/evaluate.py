"""Dense accuracy, steps per block and tokens per step, by task and context."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from herald_exec.models.base import BlockModel
from herald_exec.reference.decode import decode
from herald_exec.reference.scoring import score_sample, wilson_interval
from herald_exec.reference.tasks import Material, draw_samples


def cell(
    model: BlockModel,
    material: Material,
    task: str,
    context: int,
    count: int,
    *,
    threshold: float = 0.95,
    batch: int = 64,
    first_seed: int = 0,
) -> dict[str, Any]:
    """One task at one context: exact and partial score with 95% intervals, T and useful tokens per step."""
    samples = list(draw_samples(material, task, context, count, first_seed))
    exact = partial = 0.0
    steps: list[int] = []
    useful = 0
    for start in range(0, count, batch):
        part = samples[start : start + batch]
        decoded = decode(model, part, threshold)
        steps += [taken for row in decoded.steps for taken in row]
        useful += sum(map(len, decoded.answers))
        for sample, answer in zip(part, decoded.answers, strict=True):
            score = score_sample(sample, material.encoder.decode(answer))
            exact, partial = exact + score.exact, partial + score.partial
    return {
        "task": task,
        "context": context,
        "threshold": threshold,
        "samples": count,
        "exact": wilson_interval(exact, count)._asdict(),
        "partial": wilson_interval(partial, count)._asdict(),
        "steps_per_block": sum(steps) / len(steps),
        "blocks_per_answer": len(steps) / count,
        "useful_tokens_per_step": useful / sum(steps),
    }


def grid(
    model: BlockModel,
    material: Material,
    tasks: Sequence[str],
    contexts: Sequence[int],
    count: int,
    *,
    threshold: float = 0.95,
    batch: int = 64,
    deadline_s: float | None = None,
) -> Iterator[dict[str, Any]]:
    """:func:`cell` for every context and task; begins no cell after ``deadline_s`` (``time.monotonic``)."""
    for context in contexts:
        for task in tasks:
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            yield cell(model, material, task, context, count, threshold=threshold, batch=batch)
