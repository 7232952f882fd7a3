"""Muon for the layers' matrices, AdamW for everything else.

Muon (K. Jordan, 2024): momentum, made orthogonal by five Newton-Schulz steps. The matrices of all layers are stacked,
so one batched product serves them all; Q, K and V, and gate and up, are made orthogonal apart although they are stored
joined.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from herald_exec.reference.network import MATRICES, Network

MUON_RATE, ADAM_RATE = 0.02, 3e-3
_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on ``[..., rows, columns]``: singular values go to about one."""
    a, b, c = _COEFFICIENTS
    # bf16 products are slow on CPUs.
    x = update.to(torch.bfloat16 if update.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if tall else x
    return result.to(update.dtype)


class Muon:
    """Muon on stacked matrices ``[layers, rows, columns]``, each cut along its rows into ``sections``."""

    def __init__(self, matrices: Iterable[tuple[Tensor, list[int]]]) -> None:
        self._matrices = list(matrices)
        self.momenta = [torch.zeros_like(matrix) for matrix, _ in self._matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``; gradients are cleared."""
        for (matrix, sections), momentum in zip(self._matrices, self.momenta, strict=True):
            gradient = matrix.grad
            if gradient is None:
                continue
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = gradient.lerp(momentum, _MOMENTUM)
            parts = [
                orthogonal(part) * max(1.0, part.shape[-2] / part.shape[-1]) ** 0.5
                for part in torch.split(update, sections, dim=1)
            ]
            matrix.add_(torch.cat(parts, dim=1), alpha=-rate)
            matrix.grad = None


class Optimiser:
    """Both, for a network; ``step(scale)`` multiplies both learning rates by the schedule's value."""

    def __init__(self, network: Network) -> None:
        shape = network.shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sections = {
            "qkv": [q, kv, kv],
            "output": [shape.hidden_size],
            "gate_up": [shape.intermediate_size] * 2,
            "down": [shape.hidden_size],
        }
        self.muon = Muon((getattr(network, name), sections[name]) for name in MATRICES)
        rest = [parameter for name, parameter in network.named_parameters() if name not in MATRICES]
        fused = rest[0].is_cuda
        self.adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)

    def step(self, scale: float) -> None:
        """Update all parameters and clear their gradients."""
        self.muon.step(MUON_RATE * scale)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)

    def state(self) -> dict[str, object]:
        """What :meth:`load` takes back."""
        return {"muon": self.muon.momenta, "adam": self.adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        """Go on where :meth:`state` was taken."""
        stored: list[Tensor] = state["muon"]  # type: ignore[assignment]
        for momentum, value in zip(self.muon.momenta, stored, strict=True):
            momentum.copy_(value)
        self.adam.load_state_dict(state["adam"])  # type: ignore[arg-type]
