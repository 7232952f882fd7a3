"""The decoding loop of a bidirectional model: plan, forward, choose, commit, until every row is done.

The policy is :mod:`herald_pipeline.decoding`'s and pure; this module owns tokens, KV and time. A round is one forward.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from herald_exec.bidirectional.batch import Batch
from herald_exec.bidirectional.forward import LOGIT_ROWS, forward_positions, read_hidden, readable
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


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did. ``opened`` is the block that it committed in; tokens are after the commits."""

    number: int
    plan: ForwardPlan
    opened: BlockState
    accepted: Tensor
    scores: Scores
    record: RoundRecord
    seconds: float


@dataclass(slots=True)
class Decoded:
    """A finished run: ``tokens [R, L]`` with prompts, the rounds' records and times."""

    batch: Batch
    tokens: Tensor
    eos_position: Tensor
    records: list[RoundRecord] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    commits: list[list[list[int]]] = field(default_factory=list)

    ends: list[list[int]] = field(default_factory=list)
    """``ends[round][row]``: end of the block that the round committed in, in absolute positions."""

    def response(self, row: int, *, trim: bool = True) -> list[int]:
        """Generated token ids of a row, up to and with its first EOS."""
        start, end = int(self.batch.prompt[row]), int(self.batch.end[row])
        stop = min(int(self.eos_position[row]) + 1, end) if trim else end
        return [int(token) for token in self.tokens[row, start:stop]]

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
        self.kv = VersionedKV.empty(model, *self.tokens.shape)
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

    def score(self, kv: VersionedKV, forwarded: Tensor, read: Tensor) -> tuple[Scores, Tensor]:
        """Forward ``forwarded`` into ``kv`` and choose a token at each of ``read``; also the hidden states read."""
        shifted = self.model.shape.shifted_logits
        read = read & readable(forwarded, shifted=shifted)
        hidden = forward_positions(self.model, kv, self.tokens, forwarded, self.batch.end, self.number)
        hidden = read_hidden(hidden, forwarded, read, shifted=shifted)
        rows, positions = read.nonzero(as_tuple=True)
        with_entropy = self.policy.rule.needs_entropy
        confidence = torch.full(self.tokens.shape, UNREAD, device=self.tokens.device)
        entropy = torch.zeros_like(confidence) if with_entropy else None
        token = self.tokens.clone()
        for start in range(0, rows.shape[0], LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
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

    def step(self) -> Round:
        """One round; advances tokens, masks, block and cache state."""
        started = time.perf_counter()
        plan = self.plan()
        read = self.masked
        if not (self.policy.blocks.needs_delimiters or self.diagnose):
            # The LM head runs where its result can be committed; the sequence's logits never exist as a whole.
            read = read & self.state.active(self.masked)
        scores, self.last_hidden = self.score(self.kv, plan.forwarded, read)
        self.kv.refreshed = torch.where(plan.refresh, self.number, self.kv.refreshed)
        delimiter = torch.isin(scores.token, self.delimiters) & scores.read
        opened, accepted = self.policy.accept(
            self.state, plan, self.masked, scores.confidence, entropy=scores.entropy, delimiter=delimiter
        )
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        seconds = time.perf_counter() - started
        if self.check:
            self.kv.check(plan, self.number)
            self._check_commits(accepted, scores)
        record = record_round(
            plan,
            opened,
            self.masked,
            accepted,
            confidence=self._all_confidences(plan, scores) if self.diagnose else None,
            threshold=self.threshold,
        )
        done = Round(self.number, plan, opened, accepted, scores, record, seconds)
        self.state, self.cache = self.policy.advance(self.cache, plan, opened, self.masked, accepted)
        self.tokens = torch.where(accepted, scores.token, self.tokens)
        self.masked = self.masked & ~accepted
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
        live_masks = self.masked & plan.valid
        if bool((scores.read | ~live_masks).all()):
            return scores.confidence
        beside = VersionedKV.empty(self.model, *self.tokens.shape)
        full, _ = self.score(beside, plan.valid, live_masks)
        return full.confidence

    def rounds(self) -> Iterator[Round]:
        """Rounds until every row is done.

        Raises
        ------
        RunError
            A round commits nothing although masks are left: the policy cannot end.
        """
        while not self.done:
            done = self.step()
            if bool((done.record.live & (done.record.committed == 0)).any()):
                message = f"round {done.number} committed nothing in a row that has masks; the decoder cannot end"
                raise RunError(message)
            yield done


def _on_host(record: RoundRecord) -> RoundRecord:
    """The record in host memory, where statistics read it value by value."""
    values = {part.name: getattr(record, part.name) for part in fields(record)}
    return RoundRecord(**{name: None if value is None else value.cpu() for name, value in values.items()})


@torch.no_grad()
def decode(
    model: BlockModel, batch: Batch, policy: DecodingPolicy, sampler: Sampler | None = None, **options: Any
) -> Decoded:
    """Decode a batch to the end; ``options`` are :class:`Loop`'s."""
    loop = Loop(model, batch, policy, sampler, **options)
    records, seconds, commits, ends = [], [], [], []
    for done in loop.rounds():
        records.append(_on_host(done.record))
        seconds.append(done.seconds)
        commits.append([row.nonzero()[:, 0].tolist() for row in done.accepted.cpu()])
        ends.append(done.opened.e.tolist())
    return Decoded(batch, loop.tokens, loop.first_eos(), records, seconds, commits, ends)
