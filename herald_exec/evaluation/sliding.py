"""What a sliding window does to a block-causal model: accuracy and steps a period, with dense attention.

The decoding half of method ``herald-sliding``: the window holds ``window_blocks`` blocks, tokens may be committed in
all of it, it slides by one block when its first is committed, and that block's clean KV comes from one more forward, in
which the rest of the window goes along. Nothing is selected or moved here, so that what is lost is the schedule's. The
steps of each period are what ``herald-sim run --method herald-sliding --steps-file`` wants to know.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from herald_exec.evaluation.decoding_grid import mean_interval
from herald_exec.models.base import BlockModel
from herald_exec.reference.decode import Decoded, Rows
from herald_exec.reference.documents import BLOCK
from herald_exec.reference.scoring import score_sample, wilson_interval
from herald_exec.reference.tasks import MAX_ANSWER_TOKENS, TASKS, Material, Sample, draw_samples
from herald_exec.reference.vocabulary import EOS
from herald_pipeline.errors import check_number, raise_problems, unknown_name


@dataclass(frozen=True, slots=True)
class Plan:
    """Windows (in blocks) x tasks x contexts; ``samples`` a cell."""

    windows: tuple[int, ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    samples: int
    threshold: float = 0.95
    first_seed: int = 40_000

    @property
    def fingerprint(self) -> str:
        """Differs whenever anything of the plan does."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


PLAN = Plan(windows=(1, 2, 3), tasks=("multi", "log", "rec", "arith"), contexts=(1024, 4096), samples=200)
"""Tasks whose answers are longer than a block; fixed before the first run."""
REDUCED = Plan(windows=(1, 2, 3), tasks=("multi", "log"), contexts=(512,), samples=8)
"""Two CPU cores."""


class _Window:
    """The rows' windows from position ``start`` on, and what has been committed in them."""

    def __init__(self, rows: Rows, start: int, blocks: int, threshold: float) -> None:
        self.rows, self.start, self.threshold = rows, start, threshold
        self.mask_id = rows.model.shape.mask_token_id
        size = (rows.kv.shape[2], blocks * BLOCK)
        self.tokens = torch.full(size, self.mask_id, device=rows.model.device)
        self.masked = torch.ones_like(self.tokens, dtype=torch.bool)

    @property
    def open(self) -> Tensor:
        """``[R]`` bool: rows whose first block still holds masks."""
        return self.masked[:, :BLOCK].any(dim=1)

    def forward(self, commits: Tensor, *, always_one: bool) -> None:
        """One forward; rows of ``commits [R]`` take what is sure enough, and with ``always_one`` the best at least."""
        number, width = self.tokens.shape
        logits = self.rows.model.logits(self.rows.forward(self.tokens, self.start).flatten(0, 1)).float()
        probability = logits.softmax(dim=-1)
        probability[:, self.mask_id] = 0.0
        sure, token = (part.view(number, width) for part in probability.max(dim=-1))
        sure = sure.masked_fill(~self.masked, -1.0)
        accepted = sure >= self.threshold
        if always_one:
            best = torch.arange(width, device=sure.device) == sure.argmax(dim=1, keepdim=True)
            accepted = accepted | best
        accepted = accepted & self.masked & commits[:, None]
        self.tokens = torch.where(accepted, token, self.tokens)
        self.masked = self.masked & ~accepted

    def slide(self) -> Tensor:
        """The first block ``[R, B]``, committed; the window then begins behind it."""
        first = self.tokens[:, :BLOCK]
        fresh = torch.full_like(first, self.mask_id)
        self.tokens = torch.cat((self.tokens[:, BLOCK:], fresh), dim=1)
        self.masked = torch.cat((self.masked[:, BLOCK:], torch.ones_like(fresh, dtype=torch.bool)), dim=1)
        self.start += BLOCK
        return first


@torch.inference_mode()
def decode_sliding(
    model: BlockModel, samples: Sequence[Sample], window_blocks: int, threshold: float = 0.95
) -> Decoded:
    """Answers of samples of one task and context; ``steps`` are those of each period (the completing forward apart).

    Rows slide together; a row whose block is complete waits without committing, so that a batch equals its rows alone.
    """
    prompts = torch.tensor([sample.prompt for sample in samples], device=model.device)
    context, longest = prompts.shape[1], max(MAX_ANSWER_TOKENS[sample.task] for sample in samples)
    rows = Rows(model, prompts, context + longest + (window_blocks - 1) * BLOCK)
    window = _Window(rows, context, window_blocks, threshold)
    answers: list[list[int]] = [[] for _ in samples]
    steps: list[list[int]] = [[] for _ in samples]
    running = set(range(len(samples)))
    for _ in range(longest // BLOCK):
        taken = torch.zeros(len(samples), dtype=torch.int64, device=model.device)
        while bool(window.open.any()):
            taken += window.open
            window.forward(window.open, always_one=True)
        window.forward(~window.open, always_one=False)
        blocks, counts = window.slide().tolist(), taken.tolist()
        for row in sorted(running):
            steps[row].append(counts[row])
            ended = EOS in blocks[row]
            answers[row] += blocks[row][: blocks[row].index(EOS)] if ended else blocks[row]
            if ended:
                running.discard(row)
        if not running:
            break
    return Decoded(answers, steps)


def check_plan(plan: Plan) -> None:
    """Every number and name of a plan, before anything is loaded."""
    problems = [check_number(plan.samples, "samples", minimum=1, integer=True)]
    problems += [check_number(n, "window", minimum=1, maximum=8, integer=True) for n in plan.windows]
    raise_problems(problems)
    for task in plan.tasks:
        if task not in TASKS:
            raise unknown_name(kind="task", name=task, valid=TASKS)


def run_plan(model: BlockModel, material: Material, plan: Plan, *, batch: int = 8) -> Iterator[dict[str, Any]]:
    """A row for each cell; all windows see the same samples.

    Rows hold the exact score with its Wilson interval, and as means of answers with normal intervals the steps a
    period, the forwards an answer and the positions computed an answer (``forwards`` x window).
    """
    check_plan(plan)
    for context in plan.contexts:
        for task in plan.tasks:
            samples = list(draw_samples(material, task, context, plan.samples, plan.first_seed))
            for window in plan.windows:
                parts = [
                    decode_sliding(model, samples[first : first + batch], window, plan.threshold)
                    for first in range(0, len(samples), batch)
                ]
                texts = [material.encoder.decode(answer) for part in parts for answer in part.answers]
                steps = [row for part in parts for row in part.steps]
                right = [score_sample(sample, text).exact for sample, text in zip(samples, texts, strict=True)]
                forwards = [float(sum(row) + len(row)) for row in steps]
                yield {
                    "plan": plan.fingerprint,
                    "model": model.shape.name,
                    "task": task,
                    "context": context,
                    "window_blocks": window,
                    "samples": len(samples),
                    "exact": wilson_interval(sum(right), len(right))._asdict(),
                    "steps_per_period": mean_interval([sum(row) / len(row) for row in steps]),
                    "forwards": mean_interval(forwards),
                    "positions": mean_interval([count * window * BLOCK for count in forwards]),
                    "raw": [
                        {"seed": sample.seed, "answer": text, "exact": score, "steps": row}
                        for sample, text, score, row in zip(samples, texts, right, steps, strict=True)
                    ],
                }
