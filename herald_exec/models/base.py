"""A block-diffusion transformer, cut at attention so that the executor decides which KV is read.

One class serves SDAR, LLaDA2, LLaDA and Dream: they differ in what
:class:`herald_pipeline.model.ModelShape` says (group size, per-head norms, QKV bias, share of
rotated dimensions, experts), not in code.

A layer is two calls around the executor's attention::

    hidden = model.embed(tokens)                           # [N, H]
    rotary = model.rotary(positions)                       # once for all layers
    for layer in range(shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)     # [N, heads, d], [N, kv, d], [N, kv, d]
        hidden = model.finish(layer, hidden, attention)    # attention: [N, heads, d]
    logits = model.logits(hidden[masked])                  # masked positions only

Tokens are flat ``[N]``: rows of a batch lie one after another and may have any lengths.
"""

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.models.layers import (
    Rotary,
    experts_forward,
    rms_norm,
    rotary_table,
    rotate,
    route,
    swiglu,
)
from herald_exec.models.weights import DenseWeights, ModelWeights
from herald_pipeline.model import ModelShape


class BlockModel:
    """A transformer of any :class:`ModelShape`, layer by layer.

    Holds no KV and no position: everything it needs is passed, so that two streams may use it at
    once.

    Attributes
    ----------
    shape
        What the model looks like.
    weights
        Its tensors, all on ``device``.
    device, dtype
        Where and in which type it computes; also the type of the K and V it returns (``kv_dtype``).
    """

    def __init__(self, shape: ModelShape, weights: ModelWeights) -> None:
        self.shape = shape
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._rotary_dim = int(shape.head_dim * shape.rotary_fraction)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the keys and values that :meth:`project` returns."""
        return self.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``[N]`` to hidden states ``[N, H]``."""
        return functional.embedding(tokens, self.weights.embedding)

    def rotary(self, positions: Tensor) -> Rotary:
        """Cosines and sines of positions ``[N]``, to hand to :meth:`project` of every layer."""
        return rotary_table(positions, self._rotary_dim, self.shape.rope_theta)

    def project_unrotated(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Input norm, Q, K, V and per-head norms, before RoPE (ShadowKV factors these keys)."""
        shape, weights = self.shape, self.weights.layers[layer]
        normed = rms_norm(hidden, weights.input_norm, shape.norm_eps)
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        joined = joined.view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        q_end, k_end = shape.num_heads, shape.num_heads + shape.num_kv_heads
        q, k, v = joined[:, :q_end], joined[:, q_end:k_end], joined[:, k_end:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, shape.norm_eps)
            k = rms_norm(k, weights.k_norm, shape.norm_eps)
        return q, k, v

    def project(self, layer: int, hidden: Tensor, positions: Tensor | Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Project to one layer's queries, keys and values, after RoPE.

        Parameters
        ----------
        layer
            Zero-based.
        hidden
            ``[N, H]``, what :meth:`embed` or the previous :meth:`finish` returned.
        positions
            Absolute positions ``[N]``, or :meth:`rotary` of them (cheaper when many layers follow).

        Returns
        -------
        tuple of Tensor
            ``[N, heads, d]``, ``[N, kv, d]``, ``[N, kv, d]``. V may be a view with strides.
        """
        rotary = positions if isinstance(positions, Rotary) else self.rotary(positions)
        q, k, v = self.project_unrotated(layer, hidden)
        return rotate(q, rotary), rotate(k, rotary), v

    def finish(self, layer: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """Output projection, residual, norm, feed-forward or experts, residual.

        ``attention`` is ``[N, heads, d]``; the result is the hidden state ``[N, H]`` that enters
        the next layer.
        """
        weights = self.weights.layers[layer]
        hidden = hidden + functional.linear(attention.flatten(1), weights.output)
        return hidden + self._feed_forward(layer, rms_norm(hidden, weights.post_norm, self.shape.norm_eps))

    def _feed_forward(self, layer: int, normed: Tensor) -> Tensor:
        ffn = self.weights.layers[layer].ffn
        if isinstance(ffn, DenseWeights):
            return functional.linear(swiglu(functional.linear(normed, ffn.gate_up)), ffn.down)
        assert self.shape.moe is not None
        scores = functional.linear(normed.to(ffn.router.dtype), ffn.router)
        experts, weights = route(scores, ffn.bias, self.shape.moe)
        out = experts_forward(normed, ffn.gate_up, ffn.down, experts, weights)
        if ffn.shared_gate_up is not None and ffn.shared_down is not None:
            out = out + functional.linear(swiglu(functional.linear(normed, ffn.shared_gate_up)), ffn.shared_down)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and LM head, ``[M, H]`` -> ``[M, V]``, to masked positions only.

        Row i predicts the token at row i's own position, or at the next one when
        ``shape.shifted_logits`` (Dream): there the caller passes the hidden states of positions i -
        1.
        """
        return functional.linear(rms_norm(hidden, self.weights.norm, self.shape.norm_eps), self.weights.head)
