"""A model's tensors in the form that the executor computes with.

Projections that read the same input are joined (Q, K, V; gate and up; all experts of a layer): one
launch instead of several. :mod:`herald_exec.checkpoints.naming` maps every published name to a view
into these tensors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from herald_pipeline.model import ModelShape, MoeShape

CPU_SEEDED_PARAMS = 100_000_000
"""Up to this size weights are drawn on the CPU: a seed means the same model everywhere."""


@dataclass(slots=True)
class ExpertWeights:
    """Routed and shared experts of one layer.

    ``router`` ``[E, H]`` and ``bias`` ``[E]`` stay in fp32; ``gate_up`` ``[E, 2 I, H]``; ``down``
    ``[E, H, I]``; ``shared_gate_up`` ``[2 S I, H]`` and ``shared_down`` ``[H, S I]`` for S shared
    experts.
    """

    router: Tensor
    bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    shared_gate_up: Tensor | None
    shared_down: Tensor | None


@dataclass(slots=True)
class DenseWeights:
    """A SwiGLU feed-forward: ``gate_up`` ``[2 I, H]`` (gate above up), ``down`` ``[H, I]``."""

    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class LayerWeights:
    """One layer. ``qkv`` ``[(heads + 2 kv) d, H]``: all Q rows, then K, then V."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    post_norm: Tensor
    ffn: DenseWeights | ExpertWeights


@dataclass(slots=True)
class ModelWeights:
    """All tensors. With tied embeddings ``head`` is ``embedding``."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor once, with a name such as ``layers.3.ffn.gate_up``."""
        yield "embedding", self.embedding
        for index, layer in enumerate(self.layers):
            for field in fields(layer):
                value = getattr(layer, field.name)
                if isinstance(value, Tensor):
                    yield f"layers.{index}.{field.name}", value
            for field in fields(layer.ffn):
                value = getattr(layer.ffn, field.name)
                if isinstance(value, Tensor):
                    yield f"layers.{index}.ffn.{field.name}", value
        yield "norm", self.norm
        if self.head is not self.embedding:
            yield "head", self.head

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


def _empty_experts(shape: ModelShape, moe: MoeShape, device: torch.device, dtype: torch.dtype) -> ExpertWeights:
    hidden, width = shape.hidden_size, moe.expert_intermediate_size
    shared = moe.num_shared_experts * width
    wide = torch.promote_types(dtype, torch.float32)
    return ExpertWeights(
        router=torch.empty(moe.num_experts, hidden, device=device, dtype=wide),
        bias=torch.empty(moe.num_experts, device=device, dtype=wide) if moe.gate == "sigmoid" else None,
        gate_up=torch.empty(moe.num_experts, 2 * width, hidden, device=device, dtype=dtype),
        down=torch.empty(moe.num_experts, hidden, width, device=device, dtype=dtype),
        shared_gate_up=torch.empty(2 * shared, hidden, device=device, dtype=dtype) if shared else None,
        shared_down=torch.empty(hidden, shared, device=device, dtype=dtype) if shared else None,
    )


def _empty_layer(shape: ModelShape, index: int, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    def empty(*size: int) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype)

    hidden, width = shape.hidden_size, shape.intermediate_size
    queries = shape.num_heads * shape.head_dim
    joined = queries + 2 * shape.num_kv_heads * shape.head_dim
    ffn: DenseWeights | ExpertWeights
    if shape.moe is None or index < shape.moe.first_dense_layers:
        ffn = DenseWeights(gate_up=empty(2 * width, hidden), down=empty(hidden, width))
    else:
        ffn = _empty_experts(shape, shape.moe, device, dtype)
    return LayerWeights(
        input_norm=empty(hidden),
        qkv=empty(joined, hidden),
        qkv_bias=empty(joined) if shape.qkv_bias else None,
        q_norm=empty(shape.head_dim) if shape.qk_norm else None,
        k_norm=empty(shape.head_dim) if shape.qk_norm else None,
        output=empty(hidden, queries),
        post_norm=empty(hidden),
        ffn=ffn,
    )


def empty_weights(shape: ModelShape, device: torch.device | str, dtype: torch.dtype) -> ModelWeights:
    """Uninitialised tensors of a shape; on ``"meta"`` they only say what is expected."""
    device = torch.device(device)
    embedding = torch.empty(shape.vocab_size, shape.hidden_size, device=device, dtype=dtype)
    layers = [_empty_layer(shape, index, device, dtype) for index in range(shape.num_layers)]
    head = embedding if shape.tied_embeddings else torch.empty_like(embedding)
    norm = torch.empty(shape.hidden_size, device=device, dtype=dtype)
    return ModelWeights(embedding, layers, norm, head)


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Draw one tensor: norms near one, biases small, matrices that keep the input's scale."""
    kind = name.rpartition(".")[2]
    if kind.endswith("norm"):
        mean, deviation = 1.0, 0.1
    elif kind == "embedding":
        mean, deviation = 0.0, 1.0
    elif kind.endswith("bias"):
        mean, deviation = 0.0, 0.3
    else:
        mean, deviation = 0.0, 1.0 / math.sqrt(tensor.shape[-1])
    if tensor.device == generator.device:
        tensor.normal_(mean, deviation, generator=generator)
        return
    drawn = torch.empty(tensor.shape, device=generator.device, dtype=torch.float32)
    tensor.copy_(drawn.normal_(mean, deviation, generator=generator))


def random_weights(
    shape: ModelShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> ModelWeights:
    """Seeded random weights of any shape, directly on ``device``.

    Norm weights are jittered around one and biases around zero, because all-ones and zeros hide a
    missing norm or bias. Models of up to :data:`CPU_SEEDED_PARAMS` parameters are the same on every
    device; larger ones are drawn on the device.
    """
    weights = empty_weights(shape, device, dtype)
    on_cpu = shape.num_params <= CPU_SEEDED_PARAMS
    # The tensors' own device: "cuda" is none of them, and what is drawn apart takes twice the largest tensor, in fp32.
    generator = torch.Generator("cpu" if on_cpu else weights.embedding.device).manual_seed(seed)
    for name, tensor in weights.tensors():
        _fill(name, tensor, generator)
    return weights
