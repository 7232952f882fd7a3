"""Actions of the main stream that decide: a denoise step, and the acceptance of a step 0 that ran layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herald_exec.blocks import BlockForward, prefix_length, source
from herald_exec.requests import Row
from herald_exec.session import Session, Task, action
from herald_exec.windows import beside_a_sure_one
from herald_pipeline.decoding.sampling import Choice


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a deciding launch found.

    ``masked`` slots still hold masked positions; ``stopped`` slots' answers have ended with an EOS; ``delivered``
    tokens of the blocks completed by this launch belong to answers.
    """

    masked: frozenset[int]
    stopped: frozenset[int]
    delivered: int


@action("denoise")
def denoise(session: Session, task: Task) -> Outcome:
    """One forward of every running row: denoise, draft or complete, as each row's mode says."""
    for row in task.rows:
        session.state.begin(row)
    forward = BlockForward(session, task.rows)
    for layer in range(session.num_layers):
        forward.run(task, layer)
        task.num_bytes += _kv_bytes(session, layer, forward)
    return accept(session, forward.rows, forward.row_hidden)


def _kv_bytes(session: Session, layer: int, forward: BlockForward) -> int:
    """KV bytes that a layer's attention reads (the prefix, once a row) and writes (its own)."""
    store = source(session, layer)
    entries = sum(prefix_length(store, row) for row in forward.rows) + forward.positions.numel()
    return entries * session.entry_bytes()


def accept(session: Session, rows: Sequence[Row], hidden: Tensor) -> Outcome:
    """Choose tokens at masked positions, keep those that the policy accepts, form the draft after step 0.

    ``hidden [R, B, H]`` is what the last layer left. The LM head runs on masked positions only.
    """
    state = session.state
    open_at = [i for i, row in enumerate(rows) if not row.mode.completes]
    still: frozenset[int] = frozenset()
    if open_at:
        still = _accept_open(session, [rows[i] for i in open_at], hidden[open_at])
    if session.window > session.block_length and session.policy.commits_ahead:
        # The rest of a completed block's window goes along, and may commit what is sure.
        along = [i for i, row in enumerate(rows) if row.mode.completes]
        if along:
            _commit(session, [rows[i] for i in along], hidden[along])
    delivered = 0
    for row in rows:
        if row.mode.completes:
            count, ended = state.deliver(row, session.eos)
            delivered += count
            if session.on_block is not None:
                tokens = state.answers[row.request.id]
                ended = session.on_block(row.request.id, tokens[len(tokens) - count :]) or ended
            if ended:
                session.stopped.add(row.slot)
    return Outcome(still, frozenset(session.stopped), delivered)


def _accept_open(session: Session, rows: Sequence[Row], hidden: Tensor) -> frozenset[int]:
    state = session.state
    drafted, masked, counts = _commit(session, rows, hidden)
    still = masked[:, : session.block_length].any(dim=1).tolist()
    for i, row in enumerate(rows):
        state.commits[row.request.id][-1].append(counts[i])
        if state.steps[row.slot] == 0 and session.pipeline.template.draft_step is not None:
            state.draft[row.slot] = drafted[i]
        state.steps[row.slot] += 1
    return frozenset(row.slot for row, is_open in zip(rows, still, strict=True) if is_open)


def _commit(session: Session, rows: Sequence[Row], hidden: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Choose at masked positions of ``rows`` and keep what is accepted.

    Returns
    -------
    tuple
        The draft ``[R, W]`` (accepted and prompt tokens as they are, the argmax elsewhere), what is still masked
        ``[R, W]``, and how many tokens each row accepted.
    """
    state = session.state
    masked = state.gather(rows, state.masked)
    tokens = state.gather(rows, state.tokens)
    steps = [state.steps[row.slot] for row in rows]
    choice = _choose(session, rows, hidden, masked, steps)
    accepted = _accepted(session, choice, masked, rows, steps)
    tokens = torch.where(accepted, choice.token, tokens)
    masked = masked & ~accepted
    state.put(rows, state.tokens, tokens)
    state.put(rows, state.masked, masked)
    return torch.where(masked, choice.token, tokens), masked, accepted.sum(dim=1).tolist()


def _accepted(session: Session, choice: Choice, masked: Tensor, rows: Sequence[Row], steps: Sequence[int]) -> Tensor:
    """What the policy accepts, ``[R, W]``: as ever in blocks; in a window also ahead of the block, where it may.

    A row whose block is complete already needs no further token, so that only what is sure by itself is taken.
    """
    policy, block = session.policy, session.block_length
    if session.window == block:
        return policy.accept(choice, masked, rows, steps)
    accepted = torch.zeros_like(masked)
    if not policy.commits_ahead:
        near = Choice(*(None if part is None else part[:, :block] for part in choice))
        accepted[:, :block] = policy.accept(near, masked[:, :block], rows, steps)
        return accepted
    still = masked[:, :block].any(dim=1).tolist()
    for must in (True, False):
        at = [i for i, is_open in enumerate(still) if is_open is must]
        if not at:
            continue
        part, candidates = Choice(*(None if values is None else values[at] for values in choice)), masked[at]
        if not must:
            part, candidates = beside_a_sure_one(part, candidates)
        found = policy.accept(part, candidates, [rows[i] for i in at], [steps[i] for i in at])
        accepted[at] = found[:, : session.window]
    return accepted


def _choose(session: Session, rows: Sequence[Row], hidden: Tensor, masked: Tensor, steps: Sequence[int]) -> Choice:
    """The policy's choice at masked positions, spread over ``[R, B]``."""
    lane, offset = masked.nonzero(as_tuple=True)
    starts = torch.tensor([row.prefix for row in rows], device=masked.device)
    step = torch.tensor(list(steps), device=masked.device)
    logits = session.model.logits(hidden[masked])
    flat = session.policy.choose(logits, [rows[i] for i in lane.tolist()], starts[lane] + offset, step[lane])

    def spread(values: Tensor) -> Tensor:
        out = torch.zeros(masked.shape, dtype=values.dtype, device=values.device)
        out[masked] = values
        return out

    entropy = None if flat.entropy is None else spread(flat.entropy)
    return Choice(spread(flat.token), spread(flat.confidence), entropy)


@action("decide")
def decide(session: Session, task: Task) -> Outcome:
    """LM head and acceptance of a step 0 whose layers ran one by one (MAGE), on this stream or on another."""
    if task.reads("hidden"):
        assert session.pools.hidden is not None
        return accept(session, task.rows, session.pools.hidden[[row.slot for row in task.rows]])
    forward: BlockForward = session.passes.pop(task.stage.stream)
    return accept(session, forward.rows, forward.row_hidden)
