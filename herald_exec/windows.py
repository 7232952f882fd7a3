"""A sliding window over a block-causal model: what its positions see, and what may be committed ahead of a period.

The model was trained with the block-causal mask of its B: a position sees its own block and all before it. Rotary
positions are relative, so a block may begin anywhere; what changes with a slide is what a block begins behind. A window
of W positions from the period's start is read as blocks of B from *its own* start:

- W = B: all positions of the window see one another, as those of a block did in training. Only the prefix is unusual:
  its clean KV was made R positions at a time.
- W > B: the first B see one another, the next B see them too, and so on.
- The completing forward makes the period's clean KV: its R positions see the prefix and themselves, and nothing right
  of them, because what stands there is not final. The rest of the window goes along, sees everything as before, and may
  commit what is sure.
"""

import torch
from torch import Tensor

from herald_pipeline.decoding.sampling import Choice


def window_mask(window: int, block: int, period: int | None = None, *, device: torch.device) -> Tensor | None:
    """``[W, W]`` bool, ``True`` = may look; ``None`` where all see all.

    Parameters
    ----------
    block
        B, from the window's start.
    period
        R of a forward that makes clean KV: the first R positions see themselves only. ``None``: a step.
    """
    group = torch.arange(window, device=device) // block
    seen = group[None, :] <= group[:, None]
    if period is not None:
        seen[:period, period:] = False
    return None if bool(seen.all()) else seen


def beside_a_sure_one(choice: Choice, masked: Tensor) -> tuple[Choice, Tensor]:
    """``choice`` and ``masked [R, W]`` with one more candidate, surer than any.

    Acceptance rules always take the best candidate, so that a block ends. Where nothing has to be taken (the period is
    complete, the rest of the window goes along), this one is the best, and what else is accepted was sure by itself.
    """

    def widened(values: Tensor, with_: float) -> Tensor:
        return torch.cat([values, values.new_full((len(values), 1), with_)], dim=1)

    entropy = None if choice.entropy is None else widened(choice.entropy, -1.0)
    one_more = torch.cat([masked, masked.new_ones(len(masked), 1)], dim=1)
    return Choice(widened(choice.token, 0), widened(choice.confidence, 2.0), entropy), one_more
