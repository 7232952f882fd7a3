"""Full-attention decoding by scheduler and cache rule: LLaDA and Dream, with DSB and the caches of its comparison.

Each round computes the positions that the cache rule names, writes their KV over what was there, and attends to all
positions of the row: the others' KV is as old as the rule forgives.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.decoding.session import Chosen, DecodeSettings, Piece, Session, choose
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.caches import ForwardPlan
from herald_pipeline.decoding.schedulers import BlockState
from herald_pipeline.decoding.schedulers.adablock import DREAM_DELIMITERS, LLADA_DELIMITERS


class BidirectionalSession(Session):
    """Decoding of a batch of ragged rows, each prompt followed by ``max_new_tokens`` masks.

    Attributes
    ----------
    state
        Active block of each row.
    computed_at
        ``[rows, L]``, the round in which each position's KV was computed; -1 before the first.
    """

    def __init__(self, model: BlockModel, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> None:
        super().__init__(model, prompts, settings)
        shape, device, rows = model.shape, model.device, len(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long, device=device)
        width = max((self.positions_needed(len(prompt)) for prompt in prompts), default=0)
        answer = torch.full_like(lengths, settings.max_new_tokens)
        self._positions = torch.arange(width, device=device).expand(rows, width)
        self._tokens = torch.full((rows, width), shape.mask_token_id, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
        self.masked = (self._positions >= lengths[:, None]) & (self._positions < (lengths + answer)[:, None])
        self.state = settings.policy.blocks.start(lengths, answer)
        self._cache_state = settings.policy.cached.start(self.state, self.masked)
        self.round = 0
        self.computed_at = torch.full((rows, width), -1, dtype=torch.long, device=device)
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, width, shape.head_dim)
        self._kv = torch.zeros(size, dtype=model.kv_dtype, device=device)
        self._given = [len(prompt) for prompt in prompts]
        self._stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        model_delimiters = DREAM_DELIMITERS if shape.shifted_logits else LLADA_DELIMITERS
        self._delimiters = torch.tensor(model_delimiters, device=device)

    def positions_needed(self, prompt_tokens: int) -> int:
        """See :class:`Session`; the last block is cut at the answer's end."""
        return prompt_tokens + self.settings.max_new_tokens

    @property
    def _live(self) -> Tensor:
        live: Tensor = ~(self._stopped | self.state.done)
        return live

    @property
    def running(self) -> bool:
        """See :class:`Session`."""
        return bool(self._live.any())

    def plan(self) -> ForwardPlan:
        """What the next round computes."""
        policy = self.settings.policy
        upcoming = None
        if policy.cached.needs_upcoming:
            candidates = self.masked & self.state.active(self.masked)
            nothing = torch.zeros(self.masked.shape, device=self.model.device)
            upcoming = policy.rule(nothing, candidates, step=self.state.step, steps=policy.steps)
        return policy.cached.plan(
            self._cache_state,
            self.state,
            self.masked,
            upcoming=upcoming,
            predecessor=self.model.shape.shifted_logits,
        )

    def _forward(self, plan: ForwardPlan) -> Tensor:
        """Hidden states ``[rows, L, H]``, zero where nothing was computed; KV is replaced where it was."""
        model = self.model
        row, position = plan.forwarded.nonzero(as_tuple=True)
        counts = plan.forwarded.sum(dim=1)
        widest = int(counts.max())
        place = (plan.forwarded.cumsum(dim=1) - 1)[row, position]
        rotary = model.rotary(position)
        hidden = model.embed(torch.where(self.masked, model.shape.mask_token_id, self._tokens)[row, position])
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            keys, values = self._kv[layer]
            keys[row, :, position] = k
            values[row, :, position] = v
            queries = q.new_zeros(len(counts), widest, *q.shape[1:])
            queries[row, place] = q
            out = attend(queries, keys, values, mask=plan.valid[:, None, :])
            hidden = model.finish(layer, hidden, out[row, place])
        grid = hidden.new_zeros(*plan.forwarded.shape, hidden.shape[-1])
        grid[row, position] = hidden
        return grid

    def _choose(self, hidden: Tensor, plan: ForwardPlan) -> Chosen:
        """Choices at the masks that were computed; under AdaBlock also beyond the block, which is not known yet."""
        policy, shifted = self.settings.policy, self.model.shape.shifted_logits
        source = hidden
        available = plan.forwarded
        if shifted:
            # Logits at i - 1 speak for i; position 0 has only its own.
            source = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
            available = torch.cat((plan.forwarded[:, :1], plan.forwarded[:, :-1]), dim=1)
        wanted = self.masked & available
        if not policy.blocks.needs_delimiters:
            wanted = wanted & self.state.active(self.masked)
        return choose(
            self,
            source[wanted],
            wanted,
            self._positions,
            self.state.step,
            with_entropy=policy.rule.needs_entropy,
        )

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """See :class:`Session`."""
        policy = self.settings.policy
        live = self._live
        plan = self._without_stopped(self.plan())
        chosen = self._choose(self._forward(plan), plan)
        self.computed_at = torch.where(plan.forwarded, self.round, self.computed_at)
        delimiter = torch.isin(chosen.token, self._delimiters) if policy.blocks.needs_delimiters else None
        before = self.masked & live[:, None]
        opened, accepted = policy.accept(
            self.state, plan, before, chosen.confidence, entropy=chosen.entropy, delimiter=delimiter
        )
        self._tokens = torch.where(accepted, chosen.token, self._tokens)
        after, self._cache_state = policy.advance(self._cache_state, plan, opened, before, accepted)
        self.masked = self.masked & ~accepted
        moved = after.s > self.state.s
        self.state = _keep(live, after, self.state)
        self.round += 1
        return self._pieces(live.tolist(), moved.tolist())

    def _without_stopped(self, plan: ForwardPlan) -> ForwardPlan:
        """Plan without the rows that a stop word or an end token has ended."""
        live = self._live
        return ForwardPlan(plan.forwarded & live[:, None], plan.refresh & live, plan.valid & live[:, None])

    def _pieces(self, live: list[bool], moved: list[bool]) -> list[Piece]:
        """Tokens up to each row's leftmost mask: everything before it is final."""
        pieces = []
        done = self.state.done.tolist()
        for row, runs in enumerate(live):
            if not runs:
                continue
            self.statistics[row].forwards += 1
            self.statistics[row].blocks += moved[row]
            certain = int(self.state.end[row] if done[row] else self._leftmost_mask(row))
            tokens = self._tokens[row, self._given[row] : certain].tolist()
            self._given[row] = certain
            if tokens or done[row]:
                piece = self.deliver(row, tokens, last=done[row])
                if piece.finished:
                    self.stop(row)
                pieces.append(piece)
        return pieces

    def _leftmost_mask(self, row: int) -> int:
        open_ = self.masked[row].nonzero()
        return int(open_[0]) if open_.numel() else int(self.state.end[row])

    def stop(self, row: int) -> None:
        """See :class:`Session`."""
        self._stopped[row] = True


def _keep(live: Tensor, new: BlockState, old: BlockState) -> BlockState:
    """``new`` in the rows that ran, ``old`` in the others."""
    names = [field.name for field in fields(new)]
    return BlockState(**{name: torch.where(live, getattr(new, name), getattr(old, name)) for name in names})
