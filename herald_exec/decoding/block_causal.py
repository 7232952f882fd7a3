"""Block after block with an exact KV cache: SDAR, LLaDA2 and models of their kind.

Every forward takes one block of each running row. A row whose block held no mask when the forward began has now written
its clean KV (the completing forward) and moves to its next block; rows are never held back by slower ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.decoding.session import Chosen, DecodeSettings, Piece, Session, choose
from herald_exec.models.base import BlockModel
from herald_exec.models.forward import prefill


class BlockCausalSession(Session):
    """Dense decoding of a batch; rows of the tensors below are the rows that still run (``_rows`` names them)."""

    def __init__(self, model: BlockModel, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> None:
        super().__init__(model, prompts, settings)
        shape, device = model.shape, model.device
        block = settings.block_length
        width = max((self._end(len(prompt)) for prompt in prompts), default=0)
        self._rows = list(range(len(prompts)))
        self._prompt = [len(prompt) for prompt in prompts]
        self._tokens = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        self._masked = torch.ones(len(prompts), width, dtype=torch.bool, device=device)
        # A flag beside the ids, not the id itself, says what is open: a prompt may hold a literal mask id.
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
            self._masked[row, : len(prompt)] = False
        self._start = torch.tensor([length // block * block for length in self._prompt], device=device)
        self._step = torch.zeros(len(prompts), dtype=torch.long, device=device)
        size = (shape.num_layers, 2, len(prompts), shape.num_kv_heads, width, shape.head_dim)
        self._cache = torch.zeros(size, dtype=model.kv_dtype, device=device)
        for row, length in enumerate(self._prompt):
            self._prefill(row, length // block * block)

    @property
    def running(self) -> bool:
        """See :class:`Session`."""
        return bool(self._rows)

    def _end(self, prompt_tokens: int) -> int:
        """End of the last block, which is decoded whole; blocks are absolute multiples of B."""
        block = self.settings.block_length
        return -(-(prompt_tokens + self.settings.max_new_tokens) // block) * block

    def _prefill(self, row: int, length: int) -> None:
        """KV of the whole blocks of a prompt; its tail shares the first decoded block."""
        if length == 0:
            return

        def keep(layer: int, _q: Tensor, k: Tensor, v: Tensor) -> None:
            self._cache[layer, 0, row, :, :length] = k[0]
            self._cache[layer, 1, row, :, :length] = v[0]

        prefill(self.model, self._tokens[row, :length], keep, block=self.settings.block_length)

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states ``[rows, B, H]`` of the current blocks; their KV is written at their positions."""
        model, (rows, block) = self.model, positions.shape
        rotary = model.rotary(positions.flatten())
        hidden = model.embed(tokens.flatten())
        lengths = self._start + block
        where = torch.arange(rows, device=model.device)[:, None]
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            keys, values = self._cache[layer]
            keys[where, :, positions] = k.view(rows, block, *k.shape[1:])
            values[where, :, positions] = v.reshape(rows, block, *v.shape[1:])
            out = attend(q.view(rows, block, *q.shape[1:]), keys, values, lengths=lengths)
            hidden = model.finish(layer, hidden, out.flatten(0, 1))
        return hidden.view(rows, block, -1)

    def _commit(self, chosen: Chosen, open_: Tensor, positions: Tensor) -> None:
        """Write what the acceptance rule takes."""
        policy = self.settings.policy
        accepted = policy.rule(chosen.confidence, open_, step=self._step, steps=policy.steps, entropy=chosen.entropy)
        tokens = torch.where(accepted, chosen.token, self._tokens.gather(1, positions))
        self._tokens.scatter_(1, positions, tokens)
        self._masked.scatter_(1, positions, open_ & ~accepted)

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """See :class:`Session`."""
        block = self.settings.block_length
        positions = self._start[:, None] + torch.arange(block, device=self.model.device)
        open_ = self._masked.gather(1, positions)
        mask_id = self.model.shape.mask_token_id
        tokens = torch.where(open_, mask_id, self._tokens.gather(1, positions))
        hidden = self._forward(tokens, positions)
        with_entropy = self.settings.policy.rule.needs_entropy
        chosen = choose(self, hidden[open_], open_, positions, self._step, with_entropy=with_entropy)
        self._commit(chosen, open_, positions)
        self._step += 1
        for row in self._rows:
            self.statistics[row].forwards += 1
        was_open = open_.any(dim=1)
        still_open = self._masked.gather(1, positions).any(dim=1)
        pieces = self._finished_blocks((was_open & ~still_open).tolist())
        # The completing forward has run: the next block begins.
        self._start = torch.where(was_open, self._start, self._start + block)
        self._step = torch.where(was_open, self._step, torch.zeros_like(self._step))
        for piece in pieces:
            if piece.finished:
                self.stop(piece.row)
        return pieces

    def _finished_blocks(self, clean: list[bool]) -> list[Piece]:
        """Answers' tokens of the blocks that lost their last mask in this forward."""
        pieces = []
        for index, row in enumerate(self._rows):
            if not clean[index]:
                continue
            start = int(self._start[index])
            end = start + self.settings.block_length
            # Only positions of the answer count: an end token in the prompt's tail ends nothing.
            tokens = self._tokens[index, max(start, self._prompt[row]) : end].tolist()
            self.statistics[row].blocks += 1
            pieces.append(self.deliver(row, tokens, last=end >= self._end(self._prompt[row])))
        return pieces

    def stop(self, row: int) -> None:
        """See :class:`Session`."""
        if row not in self._rows:
            return
        keep = [index for index, other in enumerate(self._rows) if other != row]
        index = torch.tensor(keep, dtype=torch.long, device=self.model.device)
        self._rows.remove(row)
        self._tokens, self._masked = self._tokens[index], self._masked[index]
        self._start, self._step = self._start[index], self._step[index]
        self._cache = self._cache.index_select(2, index)
