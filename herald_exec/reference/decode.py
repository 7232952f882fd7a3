"""Dense block decoding of many prompts of one length at once: the quick check beside training.

The product's decoders (:mod:`herald_exec.decoding`, the executor) take ragged rows and any policy; here all prompts are
equally long and end with a block, which makes prefill a few large products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herald_exec.attention import attend, block_causal_mask
from herald_exec.models.base import BlockModel
from herald_exec.reference.documents import BLOCK
from herald_exec.reference.tasks import MAX_ANSWER_TOKENS, Sample
from herald_exec.reference.vocabulary import EOS

_PREFILL_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answers cut before their end token, and the denoising steps of each block that was decoded."""

    answers: list[list[int]]
    steps: list[list[int]]


class Rows:
    """KV of all rows (prompts ``[R, n]`` prefilled, room for ``capacity`` positions), and forwards of whole blocks."""

    def __init__(self, model: BlockModel, prompts: Tensor, capacity: int) -> None:
        self.model, self.capacity = model, capacity
        shape, rows = model.shape, prompts.shape[0]
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, capacity, shape.head_dim)
        self.kv = torch.zeros(size, dtype=model.kv_dtype, device=model.device)
        for start in range(0, prompts.shape[1], _PREFILL_CHUNK):
            self.forward(prompts[:, start : start + _PREFILL_CHUNK], start)

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        """Hidden states ``[R, n, H]`` of whole blocks from ``start`` on; their KV replaces what was there."""
        model, (rows, count) = self.model, tokens.shape
        end = start + count
        positions = torch.arange(start, end, device=tokens.device)
        rotary = model.rotary(positions.repeat(rows))
        mask = None
        if count > BLOCK:
            mask = block_causal_mask(positions, torch.arange(end, device=tokens.device), BLOCK)
        hidden = model.embed(tokens.flatten())
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            keys, values = self.kv[layer]
            keys[:, :, start:end] = k.view(rows, count, *k.shape[1:]).transpose(1, 2)
            values[:, :, start:end] = v.reshape(rows, count, *v.shape[1:]).transpose(1, 2)
            out = attend(q.view(rows, count, *q.shape[1:]), keys[:, :, :end], values[:, :, :end], mask=mask)
            hidden = model.finish(layer, hidden, out.flatten(0, 1))
        return hidden.view(rows, count, -1)


def _decode_block(rows: Rows, start: int, threshold: float) -> tuple[Tensor, Tensor]:
    """One block of every row: tokens ``[R, B]`` and steps ``[R]``; its clean KV is left in the cache."""
    model, number = rows.model, rows.kv.shape[2]
    mask_id = model.shape.mask_token_id
    tokens = torch.full((number, BLOCK), mask_id, device=model.device)
    masked = torch.ones_like(tokens, dtype=torch.bool)
    steps = torch.zeros(number, dtype=torch.int64, device=model.device)
    while bool(masked.any()):
        steps += masked.any(dim=1)
        logits = model.logits(rows.forward(tokens, start).flatten(0, 1)).float()
        probability = logits.softmax(dim=-1)
        probability[:, mask_id] = 0.0
        sure, token = (part.view(number, BLOCK) for part in probability.max(dim=-1))
        sure = sure.masked_fill(~masked, -1.0)
        best = torch.arange(BLOCK, device=model.device) == sure.argmax(dim=1, keepdim=True)
        accepted = masked & ((sure >= threshold) | best)
        tokens = torch.where(accepted, token, tokens)
        masked = masked & ~accepted
    rows.forward(tokens, start)
    return tokens, steps


@torch.inference_mode()
def decode(model: BlockModel, samples: Sequence[Sample], threshold: float = 0.95) -> Decoded:
    """Answers of samples of one task and context; a row ends with its end token or its task's longest answer."""
    prompts = torch.tensor([sample.prompt for sample in samples], device=model.device)
    context, longest = prompts.shape[1], max(MAX_ANSWER_TOKENS[sample.task] for sample in samples)
    rows = Rows(model, prompts, context + longest)
    answers: list[list[int]] = [[] for _ in samples]
    steps: list[list[int]] = [[] for _ in samples]
    running = set(range(len(samples)))
    for start in range(context, context + longest, BLOCK):
        if not running:
            break
        tokens, taken = (part.tolist() for part in _decode_block(rows, start, threshold))
        for row in sorted(running):
            steps[row].append(taken[row])
            ended = EOS in tokens[row]
            answers[row] += tokens[row][: tokens[row].index(EOS)] if ended else tokens[row]
            if ended:
                running.discard(row)
    return Decoded(answers, steps)
