"""Full-attention decoding as a session: LLaDA and Dream, by scheduler and cache rule.

:class:`herald_exec.bidirectional.Loop` decodes; here rows end at end tokens and stop words, and tokens are handed over
once nothing before them is masked.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from herald_exec.bidirectional import Loop, make_batch
from herald_exec.decoding.session import DecodeSettings, Piece, Session
from herald_exec.models.base import BlockModel


class FullAttentionSession(Session):
    """A batch of ragged rows, each prompt followed by ``max_new_tokens`` masks.

    Ending a row at its first end token changes nothing before it: those tokens are committed already.
    """

    def __init__(self, model: BlockModel, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> None:
        super().__init__(model, prompts, settings)
        batch = make_batch(
            model.shape,
            prompts,
            settings.max_new_tokens,
            seeds=[settings.seed] * len(prompts),
            device=model.device,
        )
        self.loop = Loop(model, batch, settings.policy, self.sampler)
        self._given = [len(prompt) for prompt in prompts]

    @property
    def running(self) -> bool:
        """See :class:`Session`."""
        return not self.loop.done

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """See :class:`Session`."""
        before = self.loop.state
        live = (~before.done).tolist()
        self.loop.step()
        moved = (self.loop.state.s > before.s).tolist()
        done = self.loop.state.done.tolist()
        pieces = []
        for row, runs in enumerate(live):
            if not runs:
                continue
            self.statistics[row].forwards += 1
            self.statistics[row].blocks += moved[row]
            certain = self._certain(row)
            tokens = self.loop.tokens[row, self._given[row] : certain].tolist()
            self._given[row] = certain
            if tokens or done[row]:
                piece = self.deliver(row, tokens, last=done[row])
                if piece.finished:
                    self.stop(row)
                pieces.append(piece)
        return pieces

    def _certain(self, row: int) -> int:
        """Leftmost mask of a row, or its end: what lies before it is final."""
        open_ = self.loop.masked[row].nonzero()
        return int(open_[0]) if open_.numel() else int(self.loop.state.end[row])

    def stop(self, row: int) -> None:
        """See :class:`Session`; to the loop, a stopped row is one whose whole answer is committed."""
        state = self.loop.state
        committed = state.U.clone()
        committed[row] = state.end[row] - state.prompt[row]
        self.loop.state = replace(state, U=committed)
