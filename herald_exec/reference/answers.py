"""The same held-out questions answered by several methods: what each one wrote, and whether it is right.

For pages and demonstrations. A handful of samples says nothing of a method's accuracy beyond its interval, which stands
beside it; :mod:`herald_exec.evaluation` is what measures accuracy.
"""

import time
from collections.abc import Sequence
from typing import Any

from herald_exec.checkpoints.tokenizer import TextTokenizer
from herald_exec.generate import Answer, decode_settings, generate
from herald_exec.models.base import BlockModel
from herald_exec.reference.scoring import score_sample, wilson_interval
from herald_exec.reference.tasks import Material, Sample, draw_sample

MAX_TOKENS = 96
"""Longest answer: three blocks hold every wording of every task."""
_QUESTION_MARK = "\nQuestion:"


def ask(
    model: BlockModel,
    tokenizer: TextTokenizer,
    material: Material,
    methods: Sequence[str],
    tasks: Sequence[str],
    context: int,
    samples: int,
    *,
    budget: float | None = None,
    batch: int = 8,
) -> dict[str, Any]:
    """Questions in turn over ``tasks``, each answered by every method.

    Parameters
    ----------
    context
        Prompt tokens of each sample.
    samples
        Questions in all.
    budget
        Share of the prefix that methods select; ``None``: each method's own.

    Returns
    -------
    dict
        ``rows`` (a question with one answer a method) and ``methods`` (accuracy with its 95% interval, tokens a
        forward, seconds), ready for JSON.
    """
    drawn = [draw_sample(material, tasks[i % len(tasks)], context, i // len(tasks)) for i in range(samples)]
    answered, totals = {}, {}
    for method in methods:
        settings = decode_settings(
            model.shape,
            max_tokens=MAX_TOKENS,
            block=None,
            decoder="confidence",
            threshold=None,
            scheduler="fixed",
            cache="none",
            steps=model.shape.block_length,
            method=method,
            budget=None if method == "dense" else budget,
        )
        start = time.perf_counter()
        found = generate(model, tokenizer, [sample.prompt for sample in drawn], settings, batch_size=batch)
        answered[method] = [_answer(sample, answer) for sample, answer in zip(drawn, found, strict=True)]
        totals[method] = _total(answered[method], found, time.perf_counter() - start)
    rows = [
        {
            "task": sample.task,
            "seed": sample.seed,
            "prompt_tokens": len(sample.prompt),
            "question": question(tokenizer.decode(list(sample.prompt))),
            "wanted": list(sample.fields),
            "answers": {method: answered[method][i] for method in methods},
        }
        for i, sample in enumerate(drawn)
    ]
    return {"model": model.shape.name, "context": context, "budget": budget, "rows": rows, "methods": totals}


def question(prompt: str) -> str:
    """The last question of a prompt, without the text that it is about."""
    return prompt[prompt.rfind(_QUESTION_MARK) + len(_QUESTION_MARK) :].removesuffix("Answer:").strip()


def _answer(sample: Sample, answer: Answer) -> dict[str, Any]:
    score = score_sample(sample, answer.text)
    return {
        "text": answer.text.strip(),
        "right": bool(score.exact),
        "partial": score.partial,
        "tokens": answer.tokens,
        "forwards": answer.forwards,
    }


def _total(rows: Sequence[dict[str, Any]], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    right = sum(row["right"] for row in rows)
    forwards = sum(answer.forwards for answer in answers)
    return {
        "right": right,
        "of": len(rows),
        "accuracy": wilson_interval(right, len(rows))._asdict(),
        "tokens_per_forward": sum(answer.tokens for answer in answers) / forwards if forwards else 0.0,
        "seconds": seconds,
    }
