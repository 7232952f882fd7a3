"""What is masked in training, and how much each token counts."""

from typing import NamedTuple

import torch
from torch import Tensor

from herald_exec.reference.documents import ANSWER, BLOCK, END, STATED, TEXT, WORDING

KIND_WEIGHTS = {TEXT: 0.25, STATED: 0.1, ANSWER: 3.0, END: 0.2, WORDING: 1.0}
"""Random names and values cannot be learned, so what states them counts little; what an answer must contain counts
most. With .75 for filler (the first run) about two thirds of the loss came from text, where it hardly falls."""

CALIBRATED_WEIGHTS = {TEXT: 0.25, STATED: 0.1, ANSWER: 1.0, END: 1.0, WORDING: 1.0}
"""Alike within an answer. Where a place may hold a value's token under one wording and a frame's under another, weights
by the token's kind make the model surer of the value than it may be, so that it is committed at a wrong place."""

ALL_MASKED, RATIO, SUFFIX = 0.20, 0.35, 0.45
"""Shares of the first copy's blocks: all masked; each token with one ratio per block; everything behind a cut, which is
what decoding of a block that holds a prompt's tail looks like."""

COMPLEMENT, SECOND_ALL_MASKED = 0.40, 0.20
"""Shares of the second copy's blocks: what the first copy shows; all masked. The rest is cut."""

ANCHORED, ANCHORS = 0.75, 6
"""Share of the second copy's cut blocks of which ``anchored`` runs show 1 to so many tokens at random places instead.

That is what a block looks like in its first steps, when a few tokens were committed and the wording is still open. A
single ratio a block shows so little in one block of thirty, and weights trained so put a word beside itself: given
"ins" of "port ins" as the only word, they place another "ins" behind it, with a confidence of .97.
"""


class Noisy(NamedTuple):
    """Masks ``[rows, L]`` (True: masked) and weights of the loss, zero where nothing is masked."""

    masked: Tensor
    weights: Tensor


def kind_weights(kinds: Tensor, *, calibrated: bool = False) -> Tensor:
    """Weight of each token by its kind; ``calibrated`` takes :data:`CALIBRATED_WEIGHTS`."""
    chosen = CALIBRATED_WEIGHTS if calibrated else KIND_WEIGHTS
    table = torch.tensor([chosen[kind] for kind in range(len(chosen))], device=kinds.device)
    return table[kinds.long()]


def _blocks(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per block: a choice and a ratio in [0, 1), and a cut; per token: a number in [0, 1)."""
    device, number = generator.device, length // BLOCK
    choice = torch.rand(rows, number, 1, generator=generator, device=device)
    ratio = torch.rand(rows, number, 1, generator=generator, device=device)
    cut = torch.randint(0, BLOCK, (rows, number, 1), generator=generator, device=device)
    token = torch.rand(rows, number, BLOCK, generator=generator, device=device)
    return choice, ratio, cut, token


def block_masks(rows: int, length: int, generator: torch.Generator, *, anchored: bool = False) -> tuple[Tensor, Tensor]:
    """Masks ``[rows, L]`` of the two noisy copies of a block-causal step; ``anchored`` adds :data:`ANCHORED` blocks."""
    place = torch.arange(BLOCK, device=generator.device)
    choice, ratio, cut, token = _blocks(rows, length, generator)
    first = torch.where(choice < ALL_MASKED + RATIO, token < ratio, place >= cut) | (choice < ALL_MASKED)
    choice, ratio, cut, token = _blocks(rows, length, generator)
    behind = place >= cut
    if anchored:
        shown = 1 + (ratio * ANCHORS).long()
        few = token.argsort(dim=-1).argsort(dim=-1) >= shown
        behind = torch.where(choice >= 1 - ANCHORED * (1 - COMPLEMENT - SECOND_ALL_MASKED), few, behind)
    second = torch.where(choice < COMPLEMENT, ~first, behind)
    everything = (choice >= COMPLEMENT) & (choice < COMPLEMENT + SECOND_ALL_MASKED)
    second = second | everything
    return first.flatten(1), second.flatten(1)


def response_mask(prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Mask ``[rows, L]`` of a bidirectional step; only responses are masked.

    In three rows of four each token is masked with the row's own ratio. In the fourth, a part from the left is known,
    the 32 tokens behind it are masked by the ratio, and everything further is masked: what block schedules produce.
    """
    rows, device = prompts.shape[0], generator.device
    place = torch.arange(length, device=device)[None]
    ratio = torch.rand(rows, 1, generator=generator, device=device)
    random = torch.rand(rows, length, generator=generator, device=device) < ratio
    known = torch.rand(rows, 1, generator=generator, device=device) * (length - prompts[:, None])
    start = prompts[:, None] + known.long()
    in_order = (place >= start + BLOCK) | (random & (place >= start))
    pick = torch.rand(rows, 1, generator=generator, device=device) < 0.25
    return torch.where(pick, in_order, random) & (place >= prompts[:, None])
