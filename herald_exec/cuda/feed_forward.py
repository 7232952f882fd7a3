"""Feed-forward of a layer, dense or mixture of experts, up to the norm with which the next layer begins."""

import copy

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.kernels.experts import join_experts, permute_tokens, route_tokens, split_router
from herald_exec.cuda.kernels.norms import add_norm, silu_mul
from herald_exec.models.base import BlockModel
from herald_exec.models.layers import grouped_linear
from herald_exec.models.weights import DenseWeights, ExpertWeights


class FeedForward:
    """Feed-forwards of all layers of a model, for use on one stream at a time: the experts' counters are shared."""

    def __init__(self, model: BlockModel) -> None:
        self.model = model
        self._routers: dict[int, Tensor] = {}
        for index, layer in enumerate(model.weights.layers):
            if isinstance(layer.ffn, ExpertWeights):
                self._routers[index] = split_router(layer.ffn.router, model.dtype)
        moe = model.shape.moe
        self._counts = torch.zeros(1 if moe is None else moe.num_experts, dtype=torch.int32, device=model.device)

    def beside(self) -> "FeedForward":
        """The same for another stream: with counters of its own, over the same weights."""
        other = copy.copy(self)
        other._counts = torch.zeros_like(self._counts)
        return other

    @property
    def capturable(self) -> bool:
        """Whether no launch asks the device for a number: the loop over experts of other types than bf16 does."""
        return self.model.shape.moe is None or self.model.dtype is torch.bfloat16

    def __call__(self, layer: int, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection of ``attended [N, heads * d]``, residuals, feed-forward: hidden states and their norm.

        The norm is the next layer's input norm, after the last layer the final one.
        """
        weights, eps = self.model.weights.layers[layer], self.model.shape.norm_eps
        hidden, normed = add_norm(hidden, functional.linear(attended, weights.output), weights.post_norm, eps)
        after = self.model.weights.layers[layer + 1 : layer + 2]
        next_norm = after[0].input_norm if after else self.model.weights.norm
        if isinstance(weights.ffn, DenseWeights):
            inner = silu_mul(functional.linear(normed, weights.ffn.gate_up))
            return add_norm(hidden, functional.linear(inner, weights.ffn.down), next_norm, eps)
        return self._experts(layer, weights.ffn, hidden, normed, next_norm)

    def _experts(
        self, layer: int, ffn: ExpertWeights, hidden: Tensor, normed: Tensor, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        moe = self.model.shape.moe
        assert moe is not None
        router = self._routers[layer]
        if router.dtype is torch.bfloat16 and normed.is_cuda:
            logits = torch.mm(normed, router.T, out_dtype=torch.float32)
        else:
            logits = functional.linear(normed.float(), router.float())
        experts, weights, ranks = route_tokens(logits, ffn.bias, moe, self._counts)
        x, places, ends = permute_tokens(normed, experts, ranks, self._counts)
        out = grouped_linear(silu_mul(grouped_linear(x, ffn.gate_up, ends)), ffn.down, ends)
        shared = None
        if ffn.shared_gate_up is not None and ffn.shared_down is not None:
            shared = functional.linear(silu_mul(functional.linear(normed, ffn.shared_gate_up)), ffn.shared_down)
        return join_experts(out, places, weights, shared, hidden, next_norm, self.model.shape.norm_eps, self._counts)
