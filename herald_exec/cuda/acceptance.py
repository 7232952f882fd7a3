"""From a forward's hidden states to accepted tokens, on the device with fixed shapes; the host reads a few numbers.

What is masked is chosen from and decided as in :mod:`herald_exec.denoising`; rows, counts and steps come from the lane
table, and what the host must know (accepted and open positions, the block's tokens) goes to pinned memory.

A plan of steps says beforehand how many positions a step accepts, so its outcome is foreseen: the host reads the device
once a block, for the completed blocks' tokens, and issues the steps between without waiting. A rule over confidences is
read after every step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from herald_exec.cuda.kernels.head import Head
from herald_exec.cuda.lanes import Field, LaneTable
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.policy import PlannedPolicy, Policy, RulePolicy
from herald_exec.requests import Row
from herald_exec.session import Session
from herald_pipeline.decoding.arrays import rank_descending
from herald_pipeline.decoding.sampling import hash_uniform


def policy_problem(policy: Policy) -> str | None:
    """Why the fused head cannot serve a policy, or ``None``: it gives an argmax and a confidence, nothing else."""
    if not isinstance(policy, PlannedPolicy | RulePolicy):
        return f"policy {type(policy).__name__} reads whole logits"
    if policy.sampler.temperature > 0:
        return f"temperature {policy.sampler.temperature} draws from whole logits"
    if isinstance(policy, RulePolicy) and policy.rule.needs_entropy:
        return "the acceptance rule needs entropies"
    return None


class Acceptance:
    """Acceptance of a session's launches.

    ``table`` is the forward's; :meth:`prepare` fills its decoding fields before it is sent.
    """

    def __init__(self, session: Session, table: LaneTable) -> None:
        self.session, self.table = session, table
        slots, block = session.pools.slots, session.block_length
        policy = session.policy
        assert isinstance(policy, PlannedPolicy | RulePolicy)
        forbidden = policy.sampler.mask_token_id
        self.head = Head(session.model.weights.head, slots * block, -1 if forbidden is None else forbidden)
        device = session.device
        self._offsets = torch.arange(block, device=device)
        self._flat = torch.arange(slots * block, device=device)
        self._index = torch.zeros(slots * block + 1, dtype=torch.int64, device=device)
        self._normed = torch.empty(
            slots * block, session.model.shape.hidden_size, dtype=session.model.dtype, device=device
        )
        self._found = torch.zeros(slots, block + 2, dtype=torch.int32, device=device)
        self._host = [
            torch.zeros(slots, block + 2, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self._turn = 0

    def prepare(self, rows: Sequence[Row]) -> int:
        """Fill the decoding fields of the table; positions that are still masked in open rows."""
        state, block = self.session.state, self.session.block_length
        policy, drafts = self.session.policy, self.session.pipeline.template.draft_step is not None
        counts, total = [], 0
        self._open_after: set[int] = set()
        for row in rows:
            known = min(max(len(row.request.prompt) - row.prefix, 0), block)
            accepted = sum(state.commits[row.request.id][-1])
            still = 0 if row.mode.completes else block - known - accepted
            total += still
            count = 0
            if isinstance(policy, PlannedPolicy) and still > 0:
                count = policy.count(row, state.steps[row.slot], still, block)
                if count < still:
                    self._open_after.add(row.slot)
            counts.append(count)
        steps = [state.steps[row.slot] for row in rows]
        is_open = [not row.mode.completes for row in rows]
        self._counts = counts
        self.table.set(Field.ACCEPTS, counts)
        self.table.set(Field.STEP, steps)
        self.table.set(Field.IS_OPEN, [int(o) for o in is_open])
        self.table.set(Field.IS_FIRST, [int(drafts and o and s == 0) for o, s in zip(is_open, steps, strict=True)])
        return total

    def issue(self, rows: Sequence[Row], normed: Tensor, total: int) -> Callable[[], Outcome] | Foreseen:
        """Accept on the device; the outcome, or a function that reads it once the device has passed it."""
        state, block, count = self.session.state, self.session.block_length, len(rows)
        slots, starts = (self.table[field][:count].long() for field in (Field.SLOT, Field.START))
        where = (slots[:, None], starts[:, None] + self._offsets)
        tokens = state.tokens[where]
        is_open = self.table[Field.IS_OPEN][:count, None] > 0
        masked = state.masked[where] & is_open
        chosen, confidence = self._choose(normed[: count * block], masked, tokens, total)
        accepted = self._accept(count, where[1], confidence, masked)
        tokens = torch.where(accepted, chosen, tokens)
        after = masked & ~accepted
        state.tokens[where] = tokens
        state.masked[where] = after
        # The draft: accepted and prompt tokens as they are, the argmax elsewhere.
        first = self.table[Field.IS_FIRST][:count, None] > 0
        state.draft[slots] = torch.where(first, torch.where(after, chosen, tokens), state.draft[slots])
        if isinstance(self.session.policy, PlannedPolicy):
            self._count_planned(rows)
            if not any(row.mode.completes for row in rows):
                return Foreseen(Outcome(frozenset(self._open_after), frozenset(self.session.stopped), 0))
        found = self._found[:count]
        found[:, 0], found[:, 1], found[:, 2:] = accepted.sum(dim=1), after.sum(dim=1), tokens
        self._turn = 1 - self._turn
        host = self._host[self._turn][:count]
        host.copy_(found, non_blocking=True)
        still_open = frozenset(self._open_after)
        return lambda: self._read(rows, host, still_open)

    def _count_planned(self, rows: Sequence[Row]) -> None:
        """Bookkeeping of the steps of open rows, whose counts are the plan's."""
        state = self.session.state
        for row, count in zip(rows, self._counts, strict=True):
            if not row.mode.completes:
                state.commits[row.request.id][-1].append(count)
                state.steps[row.slot] += 1

    def _choose(self, normed: Tensor, masked: Tensor, tokens: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """Token and confidence at masked positions, ``[R, B]``; the head runs on those only."""
        if total == 0:
            return tokens, torch.zeros(masked.shape, device=masked.device)
        flat = masked.flatten()
        order = flat.cumsum(0) - 1
        # Positions that are not masked all write to one place behind the end.
        self._index.scatter_(0, torch.where(flat, order, total), self._flat[: len(flat)])
        picked = self._normed[:total]
        torch.index_select(normed, 0, self._index[:total], out=picked)
        token, confidence = self.head(picked)
        place = order.clamp(0, total - 1)
        return (
            torch.where(masked, token[place].view(masked.shape), tokens),
            torch.where(masked, confidence[place].view(masked.shape), 0.0),
        )

    def _accept(self, count: int, positions: Tensor, confidence: Tensor, masked: Tensor) -> Tensor:
        policy = self.session.policy
        if isinstance(policy, PlannedPolicy):
            score = confidence
            if policy.order != "confidence":
                ids = self.table[Field.REQUEST][:count, None].long().expand_as(positions)
                score = hash_uniform(positions, ids, torch.full_like(ids, policy.seed))
            rank: Tensor = rank_descending(score, masked)
            return masked & (rank < self.table[Field.ACCEPTS][:count, None])
        assert isinstance(policy, RulePolicy)
        step = self.table[Field.STEP][:count].long()
        accepted: Tensor = policy.rule(confidence, masked, step=step, steps=policy.steps, entropy=None)
        return accepted

    def _read(self, rows: Sequence[Row], host: Tensor, foreseen: frozenset[int]) -> Outcome:
        """Bookkeeping of the host from what the device found; open rows of a plan were counted before."""
        session, state = self.session, self.session.state
        planned = isinstance(session.policy, PlannedPolicy)
        still_open, delivered = set(foreseen), 0
        for row, (accepted, masked, *tokens) in zip(rows, host.tolist(), strict=True):
            if not row.mode.completes:
                if not planned:
                    state.commits[row.request.id][-1].append(accepted)
                    state.steps[row.slot] += 1
                    if masked:
                        still_open.add(row.slot)
                continue
            count, ended = state.deliver(row, session.eos, tokens)
            delivered += count
            if session.on_block is not None:
                answer = state.answers[row.request.id]
                ended = session.on_block(row.request.id, answer[len(answer) - count :]) or ended
            if ended:
                session.stopped.add(row.slot)
        return Outcome(frozenset(still_open), frozenset(session.stopped), delivered)
