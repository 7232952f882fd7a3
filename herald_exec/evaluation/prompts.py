"""Prompts of one task and context, prefilled once for all selection rules that are compared on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from herald_exec.attention import attend, block_causal_mask
from herald_exec.models.base import BlockModel
from herald_exec.proxies import skew
from herald_exec.reference.tasks import MAX_ANSWER_TOKENS, Sample
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import Attention
from herald_pipeline.settings import Settings

_CHUNK, _ROWS = 512, 64
"""Positions and prompts that prefill takes at a time."""


class Prompts:
    """Prompts of one task and context with their KV ``[layers, 2, R, kv, context + longest answer, d]``."""

    def __init__(self, model: BlockModel, samples: Sequence[Sample]) -> None:
        if model.shape.attention is not Attention.BLOCK_CAUSAL:
            message = f"selection is about completed prefixes; {model.shape.name} is bidirectional and has none"
            raise ConfigError(message)
        if len({(sample.task, sample.context) for sample in samples}) != 1:
            message = "a study decodes samples of one task and one context at a time"
            raise ConfigError(message)
        self.model, self.samples = model, list(samples)
        self.task, self.context = samples[0].task, samples[0].context
        self.longest = MAX_ANSWER_TOKENS[self.task]
        shape = model.shape
        size = (shape.num_layers, 2, len(samples), shape.num_kv_heads, self.context + self.longest, shape.head_dim)
        self.kv = torch.zeros(size, dtype=model.kv_dtype, device=model.device)
        self._tokens = torch.tensor([sample.prompt for sample in samples], device=model.device)
        self._groups = [slice(first, first + _ROWS) for first in range(0, len(samples), _ROWS)]
        for rows in self._groups:
            for start in range(0, self.context, _CHUNK):
                self._prefill(rows, start)
        self._columns: list[Tensor] = []

    def _prefill(self, rows: slice, start: int) -> None:
        """KV of one chunk of some prompts."""
        model, tokens = self.model, self._tokens[rows, start : start + _CHUNK]
        number, count = tokens.shape
        end = start + count
        rotary = model.rotary(torch.arange(start, end, device=model.device).repeat(number))
        hidden = model.embed(tokens.flatten())
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            for part, stored in ((k, self.kv[layer, 0, rows]), (v, self.kv[layer, 1, rows])):
                stored[:, :, start:end] = part.reshape(number, count, *part.shape[1:]).transpose(1, 2)
            out = self._attend(layer, q.view(number, count, *q.shape[1:]), rows, start)
            hidden = model.finish(layer, hidden, out.flatten(0, 1))

    def _attend(self, layer: int, q: Tensor, rows: slice, start: int) -> Tensor:
        """Queries of a chunk over the prompts' KV up to its end."""
        end = start + q.shape[1]
        positions = torch.arange(end, device=self.model.device)
        mask = block_causal_mask(positions[start:], positions, self.model.shape.block_length)
        keys, values = self.kv[layer, :, rows, :, :end]
        return attend(q, keys, values, mask=mask)

    @property
    def columns(self) -> list[Tensor]:
        """InfiniGen's kept columns of every layer, ``[R, kv, d, c]``; the prompts are read once more for them."""
        if not self._columns:
            groups = [self._read_again(rows) for rows in self._groups]
            self._columns = [torch.cat(layer) for layer in zip(*groups, strict=True)]
        return self._columns

    def _read_again(self, rows: slice) -> list[Tensor]:
        """Columns of some prompts: layer by layer over whole prompts, because a layer's queries are wanted together."""
        model, tokens = self.model, self._tokens[rows]
        rotary = model.rotary(torch.arange(self.context, device=model.device).repeat(len(tokens)))
        hidden = model.embed(tokens.flatten())
        found = []
        for layer in range(model.shape.num_layers):
            q = model.project(layer, hidden, rotary)[0]
            q = q.view(*tokens.shape, *q.shape[1:])
            found.append(skew(q, model.shape.num_kv_heads, Settings().proxy_fraction))
            if layer < model.shape.num_layers - 1:
                starts = range(0, self.context, _CHUNK)
                out = [self._attend(layer, q[:, start : start + _CHUNK], rows, start) for start in starts]
                hidden = model.finish(layer, hidden, torch.cat(out, dim=1).flatten(0, 1))
        return found
