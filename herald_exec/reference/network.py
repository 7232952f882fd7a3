"""The trainable form of the reference model: the executor's weights, stacked over layers, with attention by a mask.

A block-causal step sees ``[clean | noisy 1 | noisy 2]``, three times the length: a clean token sees clean blocks up to
its own; a noisy one the clean blocks before its own and its own copy's block, both ways. Two noisy copies share one
clean pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from herald_exec.models.layers import Rotary, rms_norm, rotary_table, swiglu
from herald_exec.models.weights import DenseWeights, LayerWeights, ModelWeights
from herald_exec.reference.documents import BLOCK
from herald_pipeline.errors import RunError
from herald_pipeline.model import ModelShape

COPIES = 3
"""Clean, noisy 1, noisy 2."""


def training_mask(length: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Which position of ``[clean | noisy 1 | noisy 2]`` sees which, as FlexAttention asks for it."""

    def sees(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query_block, key_block = (query % length) // BLOCK, (key % length) // BLOCK
        from_clean, to_clean = query < length, key < length
        before = to_clean & (key_block < query_block)
        own = (query // length == key // length) & (key_block == query_block)
        return before | own | (from_clean & to_clean & (key_block <= query_block))

    return sees


def dense_training_mask(length: int, device: torch.device) -> Tensor:
    """The same as a boolean ``[3 L, 3 L]``, for devices where FlexAttention has no backward."""
    place = torch.arange(COPIES * length, device=device)
    nothing = place[:1, None]
    return training_mask(length)(nothing, nothing, place[:, None], place[None, :])


def flex_mask(length: int, device: torch.device) -> BlockMask:
    """The same for FlexAttention."""
    total = COPIES * length
    return create_block_mask(training_mask(length), None, None, total, total, device=str(device))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask | Tensor | None") -> Tensor:
    """``[R, heads, L, d]`` over ``[R, kv, L, d]``; ``mask`` ``None`` lets every position see every other."""
    if isinstance(mask, BlockMask):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a layer needs of a shape."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def project(hidden: Tensor, parts: "tuple[Tensor, ...]", rotary: Rotary, sizes: Sizes) -> "tuple[Tensor, ...]":
    """``[R, L, H]`` to Q ``[R, heads, L, d]``, K and V ``[R, kv, L, d]``; ``parts`` in the order of :data:`STACKED`."""
    input_norm, qkv, q_norm, k_norm = parts[:4]
    rows, length, _ = hidden.shape
    joined = functional.linear(rms_norm(hidden, input_norm, sizes.eps), qkv)
    joined = joined.view(rows, length, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim).transpose(1, 2)
    q, k, v = torch.split(joined, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    # Rows and heads share the angles [L, d/2].
    turned = [turn(rms_norm(x, norm, sizes.eps), rotary) for x, norm in ((q, q_norm), (k, k_norm))]
    return (*(x.contiguous() for x in turned), v.contiguous())


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    """RoPE of ``[R, heads, L, d]``; the executor's :func:`rotate` has the heads behind the positions."""
    low, high = x.float().chunk(2, dim=-1)
    turned = torch.cat((low * rotary.cos - high * rotary.sin, high * rotary.cos + low * rotary.sin), dim=-1)
    return turned.to(x.dtype)


def finish(hidden: Tensor, seen: Tensor, parts: "tuple[Tensor, ...]", sizes: Sizes) -> Tensor:
    """Output projection of ``[R, heads, L, d]``, feed-forward, and both residuals."""
    output, post_norm, gate_up, down = parts[4:]
    hidden = hidden + functional.linear(seen.transpose(1, 2).flatten(2), output)
    normed = rms_norm(hidden, post_norm, sizes.eps)
    return hidden + functional.linear(swiglu(functional.linear(normed, gate_up)), down)


def head_loss(hidden: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Cross entropy of every position ``[N]``."""
    logits = functional.linear(rms_norm(hidden, norm, eps), embedding)
    return functional.cross_entropy(logits.float(), targets, reduction="none")


STACKED = ("input_norm", "qkv", "q_norm", "k_norm", "output", "post_norm", "gate_up", "down")
MATRICES = ("qkv", "output", "gate_up", "down")


class Network(nn.Module):
    """Parameters in fp32, stacked ``[layers, ...]`` under the executor's names; computes in ``dtype``."""

    def __init__(self, shape: ModelShape, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.sizes = Sizes(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps)
        number, width, wide = shape.num_layers, shape.hidden_size, shape.intermediate_size
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        generator = torch.Generator().manual_seed(seed)

        def drawn(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * size[-1] ** -0.5)

        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, width, generator=generator) * 0.02)
        self.input_norm = nn.Parameter(torch.ones(number, width))
        self.qkv = drawn(number, q + 2 * kv, width)
        self.q_norm = nn.Parameter(torch.ones(number, shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(number, shape.head_dim))
        # Zero at first: a layer begins as the identity.
        self.output = nn.Parameter(torch.zeros(number, width, q))
        self.post_norm = nn.Parameter(torch.ones(number, width))
        self.gate_up = drawn(number, 2 * wide, width)
        self.down = nn.Parameter(torch.zeros(number, width, wide))
        self.norm = nn.Parameter(torch.ones(width))
        self._functions: tuple[Callable[..., Any], ...] = (project, attention, finish, head_loss)

    def compile(self) -> None:
        """Compile the parts of a layer and the head; all layers share the code, each length gets its own.

        Attention is compiled apart: fused with what surrounds it, it once gave other numbers (on a CPU, torch 2.13).
        """
        torch._dynamo.config.recompile_limit = 64
        self._functions = tuple(torch.compile(function, dynamic=False) for function in self._functions)

    def hidden(self, tokens: Tensor, positions: Tensor, mask: "BlockMask | Tensor | None") -> Tensor:
        """``[R, L]`` -> ``[R, L, H]``; positions ``[L]`` are alike for all rows."""
        rotary = rotary_table(positions, self.shape.head_dim, self.shape.rope_theta)
        stacks = [getattr(self, name).to(self.dtype).unbind(0) for name in STACKED]
        hidden = functional.embedding(tokens, self.embedding.to(self.dtype))
        project_, attention_, finish_, _ = self._functions
        for parts in zip(*stacks, strict=True):
            seen = attention_(*project_(hidden, parts, rotary, self.sizes), mask)
            hidden = finish_(hidden, seen, parts, self.sizes)
        return hidden

    def block_losses(self, tokens: Tensor, masks: "tuple[Tensor, Tensor]", mask: "BlockMask | Tensor") -> Tensor:
        """Cross entropy of both noisy copies, ``[R, 2, L]``."""
        rows, length = tokens.shape
        noisy = [torch.where(masked, self.shape.mask_token_id, tokens) for masked in masks]
        positions = torch.arange(length, device=tokens.device).repeat(COPIES)
        hidden = self.hidden(torch.cat([tokens, *noisy], dim=1), positions, mask)[:, length:]
        return self._losses(hidden, tokens.repeat(1, 2)).view(rows, 2, length)

    def list_losses(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Cross entropy of a bidirectional step, ``[R, L]``."""
        noisy = torch.where(masked, self.shape.mask_token_id, tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self._losses(self.hidden(noisy, positions, None), tokens).view(tokens.shape)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        embedding, norm = self.embedding.to(self.dtype), self.norm.to(self.dtype)
        losses: Tensor = self._functions[3](
            hidden.flatten(0, 1), norm, embedding, targets.flatten(), self.shape.norm_eps
        )
        return losses

    def check_compiled(self, rows: int, length: int) -> None:
        """Compare the compiled functions with the plain ones and a dense mask, on random weights and tokens.

        Only the first row is computed plainly: a dense mask's scores of all rows would not fit beside it.

        Raises
        ------
        RunError
            Hidden states differ by more than rounding.
        """
        device = self.embedding.device
        probe = Network(self.shape, 1, self.dtype).to(device)
        for parameter in probe.parameters():
            # Untrained output matrices are zero, which would hide a wrong attention.
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        tokens = torch.randint(3, self.shape.vocab_size, (rows, COPIES * length), device=device)
        positions = torch.arange(length, device=device).repeat(COPIES)
        with torch.no_grad():
            plain = probe.hidden(tokens[:1], positions, dense_training_mask(length, device)).float()
        probe._functions = self._functions
        # With gradients, so that what is compiled here is what training runs.
        compiled = probe.hidden(tokens, positions, flex_mask(length, device))[:1].detach().float()
        error = float((compiled - plain).norm() / plain.norm())
        if not error < 0.1:
            message = f"compiled layers differ from plain ones by {error:.3f} (relative norm) on {device}; at most 0.1"
            raise RunError(message)

    @torch.no_grad()
    def weights(self, dtype: torch.dtype) -> ModelWeights:
        """The executor's weights, rounded to ``dtype``; copies."""

        def one(name: str, index: int) -> Tensor:
            stacked: Tensor = getattr(self, name)
            return stacked[index].to(dtype, copy=True)

        layers = [
            LayerWeights(
                input_norm=one("input_norm", index),
                qkv=one("qkv", index),
                qkv_bias=None,
                q_norm=one("q_norm", index),
                k_norm=one("k_norm", index),
                output=one("output", index),
                post_norm=one("post_norm", index),
                ffn=DenseWeights(one("gate_up", index), one("down", index)),
            )
            for index in range(self.shape.num_layers)
        ]
        embedding = self.embedding.to(dtype, copy=True)
        return ModelWeights(embedding, layers, self.norm.to(dtype, copy=True), embedding)

    @torch.no_grad()
    def take(self, weights: ModelWeights) -> None:
        """Start from these weights."""
        self.embedding.copy_(weights.embedding)
        self.norm.copy_(weights.norm)
        for index, stored in enumerate(weights.layers):
            for name in STACKED:
                source = stored.ffn if name in ("gate_up", "down") else stored
                getattr(self, name)[index].copy_(getattr(source, name))
