"""Full-attention decoding (LLaDA, Dream) by scheduler and cache rule.

:class:`herald_exec.bidirectional.Loop` decodes; here answers end at end tokens and stop words, and tokens are handed
over once nothing before them is masked.
"""

from collections.abc import Sequence

import torch

from herald_exec.bidirectional import Loop, make_batch
from herald_exec.decoding.delivery import DecodeSettings, Delivery
from herald_exec.models.base import BlockModel

_SEED_STRIDE = 1_000_003
"""Seed of a prompt: settings' seed times this, plus its index (as the runner's policy has it)."""


def decode_full_attention(
    model: BlockModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    delivery: Delivery,
    batch_size: int,
) -> None:
    """Decode all prompts in batches of ragged rows.

    Ending an answer at its first end token changes nothing before it: those tokens are committed already.
    """
    for first in range(0, len(prompts), batch_size):
        _Rows(model, prompts[first : first + batch_size], settings, delivery, first).run()


class _Rows:
    """One batch; row r is prompt ``first`` + r."""

    def __init__(
        self,
        model: BlockModel,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
        delivery: Delivery,
        first: int,
    ) -> None:
        batch = make_batch(
            model.shape,
            prompts,
            settings.max_new_tokens,
            seeds=[settings.seed * _SEED_STRIDE + first + row for row in range(len(prompts))],
            device=model.device,
        )
        self._loop = Loop(model, batch, settings.policy, settings.sampler(model.shape.mask_token_id))
        self._delivery = delivery
        self._first = first
        self._given = [len(prompt) for prompt in prompts]

    @torch.inference_mode()
    def run(self) -> None:
        """Rounds until every row has ended."""
        while not self._loop.done:
            before = self._loop.state
            live = (~before.done).tolist()
            self._loop.step()
            moved = (self._loop.state.s > before.s).tolist()
            done = self._loop.state.done.tolist()
            for row in (row for row, runs in enumerate(live) if runs):
                statistics = self._delivery.statistics[self._first + row]
                statistics.forwards += 1
                statistics.blocks += moved[row]
                self._hand_over(row, last=done[row])

    def _hand_over(self, row: int, *, last: bool) -> None:
        certain = self._certain(row)
        tokens = self._loop.tokens[row, self._given[row] : certain].tolist()
        self._given[row] = certain
        if (tokens or last) and self._delivery.deliver(self._first + row, tokens, last=last):
            self._loop.stop(torch.arange(len(self._given), device=self._loop.masked.device) == row)

    def _certain(self, row: int) -> int:
        """Leftmost mask of a row, or its end: what lies before it is final."""
        open_ = self._loop.masked[row].nonzero()
        return int(open_[0]) if open_.numel() else int(self._loop.state.end[row])
