"""Decoding policies of the executor: from a block's choices to the positions that become tokens.

:class:`RulePolicy` puts an acceptance rule (:mod:`herald_pipeline.decoding.acceptance`) over real confidences.
:class:`PlannedPolicy` follows a plan of steps: speed runs at fixed T, and tests that need every T from 1 to B.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from herald_exec.requests import Row
from herald_pipeline.decoding.acceptance import AcceptanceRule
from herald_pipeline.decoding.arrays import rank_descending
from herald_pipeline.decoding.sampling import Choice, Sampler, hash_uniform
from herald_pipeline.steps import Steps, even_commits

_NEVER = 1 << 30


class Policy(Protocol):
    """Chooses tokens, and which of them stay.

    ``commits_ahead``: whether it may be asked about positions behind the block, where a window has such.
    """

    commits_ahead: bool

    def choose(self, logits: Tensor, rows: Sequence[Row], positions: Tensor, step: Tensor) -> Choice:
        """Token, confidence (and entropy) for ``logits [M, V]`` at absolute ``positions [M]``.

        ``rows`` has one entry for each of the M; ``step [M]`` is the row's denoising step.
        """
        ...

    def accept(self, choice: Choice, masked: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
        """``[R, B]`` bool, a subset of ``masked`` with at least one entry a row; ``choice`` is ``[R, B]``."""
        ...


@dataclass(frozen=True)
class RulePolicy:
    """An acceptance rule over the model's confidences.

    ``steps`` is T for rules with a schedule; ``seed`` gives each request its own draws at a temperature above 0.
    """

    rule: AcceptanceRule
    sampler: Sampler = field(default_factory=Sampler)
    steps: int = 32
    seed: int = 0

    commits_ahead = True

    def choose(self, logits: Tensor, rows: Sequence[Row], positions: Tensor, step: Tensor) -> Choice:
        """See :class:`Policy`."""
        with_entropy = self.rule.needs_entropy
        if self.sampler.temperature == 0:
            return self.sampler(logits, with_entropy=with_entropy)
        seeds = torch.tensor([self.seed * 1_000_003 + row.request.id for row in rows], device=logits.device)
        return self.sampler(logits, seed=seeds, position=positions, step=step, with_entropy=with_entropy)

    def accept(self, choice: Choice, masked: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
        """See :class:`Policy`."""
        step = torch.tensor(list(steps), device=masked.device)
        accepted = self.rule(choice.confidence, masked, step=step, steps=self.steps, entropy=choice.entropy)
        assert isinstance(accepted, Tensor)
        return accepted


@dataclass(frozen=True)
class PlannedPolicy:
    """A plan of steps: step i of a block accepts as many tokens as the plan says.

    ``order`` is ``confidence`` (the most confident first, DESIGN section 5 point 7) or ``scripted``: positions in an
    order that a hash of (request, position) gives, whatever the model thinks. A block that starts with fewer masked
    positions than B (a prompt's tail) takes as many steps as the plan, or one per position when there are fewer.
    """

    plan: Steps
    sampler: Sampler = field(default_factory=Sampler)
    order: str = "confidence"
    seed: int = 0

    commits_ahead = False
    """A plan counts the steps of a block: all of its tokens are committed in them."""

    def choose(self, logits: Tensor, rows: Sequence[Row], positions: Tensor, step: Tensor) -> Choice:
        """See :class:`Policy`."""
        choice = self.sampler(logits)
        if self.order == "confidence":
            return choice
        ids = torch.tensor([row.request.id for row in rows], dtype=torch.int64, device=logits.device)
        return choice._replace(confidence=hash_uniform(positions, ids, ids * 0 + self.seed))

    def accept(self, choice: Choice, masked: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
        """See :class:`Policy`."""
        open_positions = masked.sum(dim=1).tolist()
        counts = [
            self.count(row, step, int(still), masked.shape[1])
            for row, step, still in zip(rows, steps, open_positions, strict=True)
        ]
        rank = rank_descending(choice.confidence, masked)
        assert isinstance(rank, Tensor)
        return masked & (rank < torch.tensor(counts, device=masked.device)[:, None])

    def count(self, row: Row, step: int, still: int, block_length: int) -> int:
        """Tokens that this step of the row's block accepts; ``still`` positions are masked."""
        known = min(max(len(row.request.prompt) - row.prefix, 0), block_length)
        at_first = block_length - known
        counts = self.plan.commits(row.request.id, row.block)
        if sum(counts) != at_first:
            counts = even_commits(min(len(counts), at_first), at_first)
        count = counts[step] if step < len(counts) else _NEVER
        return max(1, min(count, still))
