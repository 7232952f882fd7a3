"""The decoding loop of a bidirectional model: plan, forward, choose, commit, until every row is done.

The policy is :mod:`herald_pipeline.decoding`'s and pure; this module owns tokens, KV and time. A round is one forward.
On a GPU a round waits for the device once, to learn its sizes; records stay there until the run ends.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from herald_exec.bidirectional.batch import Batch
from herald_exec.bidirectional.forward import (
    LOGIT_VALUES,
    Extent,
    extent_of,
    forward_positions,
    places_of,
    read_hidden,
    readable,
    true_indices,
)
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.arrays import first_true
from herald_pipeline.decoding.caches import ForwardPlan
from herald_pipeline.decoding.policy import DecodingPolicy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.decoding.schedulers import DREAM_DELIMITERS, LLADA_DELIMITERS, BlockState
from herald_pipeline.decoding.statistics import RoundRecord, first_eos, record_round, summarise
from herald_pipeline.errors import RunError

UNREAD = -1.0
"""Confidence of positions without logits; below every real one."""
UNCOMMITTED = -1
"""Stands for the token of a mask where tokens are compared; no token has this id."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Per position ``[R, L]``: the chosen token, its confidence (:data:`UNREAD` where not read), entropy if asked."""

    token: Tensor
    confidence: Tensor
    entropy: Tensor | None
    read: Tensor


Mark = float | torch.cuda.Event
"""A moment: seconds on a CPU, an event of the stream on a GPU."""


def mark(device: torch.device) -> Mark:
    """The present moment, without waiting for the device to reach it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Mark, ended: Mark) -> float:
    """Time from one moment to a later one; waits until the device has reached it."""
    if isinstance(began, float) or isinstance(ended, float):
        return float(ended) - float(began)  # type: ignore[arg-type]
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


class Prepared(NamedTuple):
    """What a round is going to compute: the plan, the positions whose logits it reads, and the sizes of both."""

    plan: ForwardPlan
    read: Tensor
    extent: Extent
    began: Mark


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did. ``opened`` is the block that it committed in; tokens are after the commits."""

    number: int
    plan: ForwardPlan
    opened: BlockState
    accepted: Tensor
    scores: Scores
    record: RoundRecord
    began: Mark
    ended: Mark

    @property
    def seconds(self) -> float:
        """From its plan to the next block's bounds; records and checks are not the decoder's work."""
        return seconds_between(self.began, self.ended)


@dataclass(slots=True)
class Decoded:
    """A finished run: ``tokens [R, L]`` with prompts, the rounds' records and times, all in host memory.

    ``committed_in [R, L]``: the round that committed a position, -1 for none.
    """

    batch: Batch
    tokens: Tensor
    eos_position: Tensor
    committed_in: Tensor
    records: list[RoundRecord] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def commits(self) -> list[list[list[int]]]:
        """``commits[round][row]``: positions, in absolute numbers."""
        return [[row.nonzero()[:, 0].tolist() for row in self.committed_in == i] for i in range(len(self.records))]

    def response(self, row: int, *, trim: bool = True) -> list[int]:
        """Generated token ids of a row, up to and with its first EOS."""
        start, end = int(self.batch.prompt[row]), int(self.batch.end[row])
        stop = min(int(self.eos_position[row]) + 1, end) if trim else end
        response: list[int] = self.tokens[row, start:stop].tolist()
        return response

    def statistics(self) -> dict[str, Any]:
        """See :func:`herald_pipeline.decoding.statistics.summarise`."""
        return summarise(self.records, eos_position=self.eos_position, prompt=self.batch.prompt)


class Loop:
    """State of a run between rounds.

    Parameters
    ----------
    model, batch, policy, sampler
        What decodes what, and how. The sampler's mask token is the model's.
    check
        Assert the cache's invariants each round (active and window are this round's, nothing reused is older than the
        last refresh, commits were computed).
    diagnose
        Confidences of *all* masked positions each round, for the late and premature ratios. With a cache that computes
        less, a full forward beside the run gives them; it is not counted.
    threshold
        Confidence that the diagnosis calls sure.
    stop_at_eos
        End a row as soon as its answer is final: an EOS is committed and nothing left of it is masked. What is masked
        right of it stays so, and neither its rounds nor its tokens are counted; nothing before it changes.
    delimiters
        Token ids that end an AdaBlock block; by default the released ones of LLaDA, or Dream where logits are shifted.
    """

    def __init__(
        self,
        model: BlockModel,
        batch: Batch,
        policy: DecodingPolicy,
        sampler: Sampler | None = None,
        *,
        check: bool = False,
        diagnose: bool = False,
        threshold: float = 0.9,
        stop_at_eos: bool = False,
        delimiters: tuple[int, ...] | None = None,
    ) -> None:
        self.model, self.batch, self.policy = model, batch, policy
        self.sampler = sampler or Sampler(mask_token_id=model.shape.mask_token_id)
        self.check, self.diagnose, self.threshold = check, diagnose, threshold
        self.stop_at_eos = stop_at_eos
        default = DREAM_DELIMITERS if model.shape.shifted_logits else LLADA_DELIMITERS
        self.delimiters = torch.tensor(delimiters or default, device=model.device)
        self.tokens = batch.tokens.clone()
        self.masked = batch.masked.clone()
        rows, width = self.tokens.shape
        self.kv = VersionedKV.empty(model, rows, width, check)
        self.lengths = None if bool((batch.end == width).all()) else batch.end
        self.stuck = torch.zeros_like(batch.prompt, dtype=torch.bool)
        self.state = policy.blocks.start(batch.prompt, batch.response)
        self.cache = policy.cached.start(self.state, self.masked)
        self.number = 0
        self.last_hidden = torch.empty(0, model.shape.hidden_size, device=model.device)

    @property
    def done(self) -> bool:
        """Every row's response is committed."""
        return bool(self.state.done.all())

    def plan(self) -> ForwardPlan:
        """Positions of the next forward."""
        upcoming = None
        if self.policy.cached.needs_upcoming:
            unread = torch.full(self.tokens.shape, UNREAD, device=self.tokens.device)
            _, upcoming = self.policy.accept(self.state, self._nothing(), self.masked, unread)
        return self.policy.cached.plan(
            self.cache,
            self.state,
            self.masked,
            upcoming=upcoming,
            predecessor=self.model.shape.shifted_logits,
        )

    def _nothing(self) -> ForwardPlan:
        none = torch.zeros_like(self.masked)
        return ForwardPlan(none, none[:, 0], none)

    def score(
        self, kv: VersionedKV, forwarded: Tensor, read: Tensor, extent: Extent | None = None
    ) -> tuple[Scores, Tensor]:
        """Forward ``forwarded`` into ``kv`` and choose a token at each of ``read``; also the hidden states read.

        ``extent`` is that of both; without it, it is found here.
        """
        shifted = self.model.shape.shifted_logits
        read = read & readable(forwarded, shifted=shifted)
        extent = extent or extent_of(forwarded, self.batch.end, read)
        places = places_of(forwarded, self.batch.end, extent)
        hidden = forward_positions(self.model, kv, self.tokens, places, self.lengths, self.number)
        index = true_indices(read.flatten(), extent.read)
        rows, positions = index // read.shape[1], index % read.shape[1]
        hidden = read_hidden(hidden, places, rows, positions, shifted=shifted)
        with_entropy = self.policy.rule.needs_entropy
        confidence = torch.full(self.tokens.shape, UNREAD, device=self.tokens.device)
        entropy = torch.zeros_like(confidence) if with_entropy else None
        token = self.tokens.clone()
        size = max(1, LOGIT_VALUES // self.model.shape.vocab_size)
        for start in range(0, extent.read, size):
            part = slice(start, start + size)
            choice = self.sampler(
                self.model.logits(hidden[part]).float(),
                seed=self.batch.seeds[rows[part]],
                position=positions[part],
                step=self.number,
                with_entropy=with_entropy,
            )
            token[rows[part], positions[part]] = choice.token
            confidence[rows[part], positions[part]] = choice.confidence
            if entropy is not None and choice.entropy is not None:
                entropy[rows[part], positions[part]] = choice.entropy
        return Scores(token, confidence, entropy, read), hidden

    def prepare(self) -> Prepared | None:
        """The next round's plan and sizes; ``None`` when every row is done.

        Raises
        ------
        RunError
            The last round committed nothing although masks were left: the policy cannot end.
        """
        began = mark(self.model.device)
        plan = self.plan()
        read = self.masked
        if not (self.policy.blocks.needs_delimiters or self.diagnose):
            # The LM head runs where its result can be committed; the sequence's logits never exist as a whole.
            read = read & self.state.active(self.masked)
        read = read & readable(plan.forwarded, shifted=self.model.shape.shifted_logits)
        extent = extent_of(plan.forwarded, self.batch.end, read, self.stuck)
        if extent.flagged:
            message = f"round {self.number - 1} committed nothing in a row that has masks; the decoder cannot end"
            raise RunError(message)
        return Prepared(plan, read, extent, began) if extent.positions else None

    def step(self, prepared: Prepared | None = None) -> Round:
        """One round; advances tokens, masks, block and cache state."""
        prepared = prepared or self.prepare()
        if prepared is None:
            message = f"round {self.number} has nothing to compute: every row is done"
            raise RunError(message)
        plan, masked = prepared.plan, self.masked
        scores, self.last_hidden = self.score(self.kv, plan.forwarded, prepared.read, prepared.extent)
        self.kv.refreshed = torch.where(plan.refresh, self.number, self.kv.refreshed)
        delimiter = None
        if self.policy.blocks.needs_delimiters:
            delimiter = torch.isin(scores.token, self.delimiters) & scores.read
        opened, accepted = self.policy.accept(
            self.state, plan, masked, scores.confidence, entropy=scores.entropy, delimiter=delimiter
        )
        self.state, self.cache = self.policy.advance(self.cache, plan, opened, masked, accepted)
        after = torch.where(accepted, scores.token, self.tokens)
        ended = mark(self.model.device)
        if self.check:
            self.kv.check(plan, self.number)
            self._check_commits(accepted, scores)
        record = record_round(
            plan,
            opened,
            masked,
            accepted,
            confidence=self._all_confidences(plan, scores) if self.diagnose else None,
            threshold=self.threshold,
        )
        done = Round(self.number, plan, opened, accepted, scores, record, prepared.began, ended)
        self.tokens = after
        self.masked = masked & ~accepted
        self.stuck = record.live & (record.committed == 0)
        self.number += 1
        if self.stop_at_eos:
            eos = self.first_eos()
            # Masks hold no token yet, so the first EOS is final once the leftmost mask lies right of it.
            self.stop(eos < first_true(self.masked & self.state.valid(self.masked), self.state.end))
        return done

    def stop(self, rows: Tensor) -> None:
        """Take ``rows [R]`` bool out of the run; to the policy, their whole response is committed."""
        whole = self.state.end - self.state.prompt
        self.state = replace(self.state, U=torch.where(rows, whole, self.state.U))

    def first_eos(self) -> Tensor:
        """``[R]``: position of the first committed EOS of each response, its end where there is none."""
        unmasked = torch.where(self.masked, UNCOMMITTED, self.tokens)
        position: Tensor = first_eos(unmasked, self.state, self.model.shape.eos_token_ids)
        return position

    def _check_commits(self, accepted: Tensor, scores: Scores) -> None:
        if bool((accepted & ~scores.read).any()):
            row, position = (int(index) for index in (accepted & ~scores.read).nonzero()[0])
            message = f"row {row}, position {position} was committed in round {self.number} without logits"
            raise RunError(message)

    def _all_confidences(self, plan: ForwardPlan, scores: Scores) -> Tensor:
        if self.policy.cache == "none":
            # Every forward is whole, and a diagnosed one reads every mask.
            return scores.confidence
        rows, width = self.tokens.shape
        beside = VersionedKV.empty(self.model, rows, width, False)
        full, _ = self.score(beside, plan.valid, self.masked & plan.valid)
        return full.confidence

    def rounds(self) -> Iterator[Round]:
        """Rounds until every row is done.

        Raises
        ------
        RunError
            A round commits nothing although masks are left: the policy cannot end.
        """
        while (prepared := self.prepare()) is not None:
            yield self.step(prepared)


def _on_host(records: list[RoundRecord]) -> list[RoundRecord]:
    """The records in host memory, where statistics read them value by value; one transfer a field."""
    found: dict[str, Any] = {}
    for part in fields(RoundRecord):
        values = [getattr(record, part.name) for record in records]
        known = not any(value is None for value in values)
        found[part.name] = torch.stack(values).cpu().numpy() if known else [None] * len(values)
    return [RoundRecord(**{name: values[i] for name, values in found.items()}) for i in range(len(records))]


@torch.no_grad()
def decode(
    model: BlockModel, batch: Batch, policy: DecodingPolicy, sampler: Sampler | None = None, **options: Any
) -> Decoded:
    """Decode a batch to the end; ``options`` are :class:`Loop`'s."""
    loop = Loop(model, batch, policy, sampler, **options)
    records, marks = [], []
    committed_in = torch.full_like(batch.tokens, -1)
    for done in loop.rounds():
        records.append(done.record)
        marks.append((done.began, done.ended))
        committed_in.masked_fill_(done.accepted, done.number)
    tokens, eos = loop.tokens.cpu(), loop.first_eos().cpu()
    seconds = [seconds_between(*pair) for pair in marks]
    return Decoded(batch.to("cpu"), tokens, eos, committed_in.cpu(), _on_host(records), seconds)
