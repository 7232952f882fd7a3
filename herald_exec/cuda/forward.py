"""One forward of lanes through all layers as a CUDA graph: the numbers of :class:`herald_exec.blocks.BlockForward`.

A layer is twelve launches (seven with a dense feed-forward): QKV, heads into place, attention, output projection,
residual and norm, router, routing, permutation, two grouped matmuls around SiLU, shared experts, weighted sum and norm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.blocks import source
from herald_exec.cuda.kernels.attention import attend_lanes, place_heads
from herald_exec.cuda.kernels.experts import join_experts, permute_tokens, route_tokens, split_router
from herald_exec.cuda.kernels.norms import add_norm, silu_mul
from herald_exec.cuda.lanes import Field, LaneTable, bucket
from herald_exec.models.layers import Rotary, grouped_linear
from herald_exec.models.weights import DenseWeights, ExpertWeights
from herald_exec.pools import KV
from herald_exec.session import Session

PROGRAMS_WANTED = 528
"""Programs of an attention launch that keep every multiprocessor of an H100 or H200 busy four times over."""
KEYS_PER_SPLIT = 256
"""Fewest keys that are worth a split of their own."""


class LaneForward:
    """Forward of lanes over the pools of a session.

    Parameters
    ----------
    lanes
        Most lanes of one launch.
    graphs
        Capture each number of lanes once and replay it. Without it the launches are issued one by one.
    """

    def __init__(self, session: Session, lanes: int, *, graphs: bool) -> None:
        self.session = session
        self.table = LaneTable(lanes, session.device)
        # The loop over experts of other types than bf16 asks the device how many rows each has.
        moe = session.model.shape.moe
        self.graphs = graphs and (moe is None or session.model.dtype is torch.bfloat16)
        self._captured: dict[int, tuple[Any, Tensor]] = {}
        self._memory: Any = None
        self._offsets = torch.arange(session.block_length, device=session.device)
        self._routers: dict[int, Tensor] = {}
        for index, layer in enumerate(session.model.weights.layers):
            if isinstance(layer.ffn, ExpertWeights):
                self._routers[index] = split_router(layer.ffn.router, session.model.dtype)
        experts = moe.num_experts if moe is not None else 1
        self._counts = torch.zeros(experts, dtype=torch.int32, device=session.device)
        self._out_store = next((s for name, s in session.pools.stores.items() if name in ("draft_out", "clean")), None)

    def __call__(self, lanes: int) -> Tensor:
        """Final normed hidden states ``[lanes * B, H]`` of the lanes in the table; the next call overwrites them."""
        if not self.graphs:
            return self.run(lanes)
        if lanes not in self._captured:
            self.capture(lanes)
        graph, out = self._captured[lanes]
        graph.replay()
        return out

    def capture(self, lanes: int) -> None:
        """Capture the graph of this many lanes on the current stream.

        Runs the forward once before, which compiles its kernels; it stores what the replay stores again.
        """
        lanes = bucket(lanes)
        if not self.graphs or lanes in self._captured:
            return
        self.run(lanes)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on working with the device meanwhile.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            out = self.run(lanes)
        finally:
            graph.capture_end()
        self._memory = self._memory or graph.pool()
        self._captured[lanes] = (graph, out)

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._captured.clear()

    # One forward -----------------------------------------------------------------------------------------------------

    def run(self, lanes: int) -> Tensor:
        """The forward, launch by launch."""
        model, state = self.session.model, self.session.state
        slots, starts = (self.table[field][:lanes].long() for field in (Field.SLOT, Field.START))
        positions = starts[:, None] + self._offsets
        tokens, masked = (values[slots[:, None], positions] for values in (state.tokens, state.masked))
        ids = torch.where(masked, model.shape.mask_token_id, tokens)
        ids = torch.where(self.table[Field.IS_DRAFT][:lanes, None] > 0, state.draft[slots], ids)
        rotary = model.rotary(positions.flatten())
        hidden = model.embed(ids.flatten())
        layers = model.weights.layers
        hidden, normed = add_norm(hidden, None, layers[0].input_norm, model.shape.norm_eps)
        for layer in range(len(layers)):
            hidden, normed = self._layer(layer, lanes, hidden, normed, rotary)
        return normed

    def _layer(self, layer: int, lanes: int, hidden: Tensor, normed: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """A layer, and the norm with which the next one (or the head) begins."""
        weights, eps = self.session.model.weights.layers[layer], self.session.model.shape.norm_eps
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        attended = self._attention(layer, lanes, joined, rotary)
        hidden, normed = add_norm(hidden, functional.linear(attended, weights.output), weights.post_norm, eps)
        after = self.session.model.weights.layers[layer + 1 : layer + 2]
        next_norm = after[0].input_norm if after else self.session.model.weights.norm
        if isinstance(weights.ffn, DenseWeights):
            inner = silu_mul(functional.linear(normed, weights.ffn.gate_up))
            return add_norm(hidden, functional.linear(inner, weights.ffn.down), next_norm, eps)
        return self._experts(layer, weights.ffn, hidden, normed, next_norm)

    def _attention(self, layer: int, lanes: int, joined: Tensor, rotary: Rotary) -> Tensor:
        session, shape = self.session, self.session.model.shape
        weights, store = session.model.weights.layers[layer], source(session, layer)
        kind = "SPARSE" if store.name == "sparse" else "FULL"
        row, length, store_row, store_at = (
            self.table[Field[f"{kind}_{what}"]][:lanes] for what in ("ROW", "LENGTH", "STORE_ROW", "STORE_AT")
        )
        pool, out = store.layer(layer), None
        if self._out_store is not None and self._out_store.holds(layer):
            leaving: KV = self._out_store.layer(layer)
            out = (leaving.keys, leaving.values, self.table[Field.OUT_ROW][:lanes])
        q, own_k, own_v = place_heads(
            joined,
            weights.q_norm,
            weights.k_norm,
            rotary,
            shape.norm_eps,
            lanes,
            (shape.num_heads, shape.num_kv_heads),
            (pool.keys, pool.values, store_row, store_at),
            out,
        )
        splits = num_splits(lanes * shape.num_kv_heads, store.capacity)
        return attend_lanes(q, pool.keys, pool.values, (own_k, own_v), row, length, splits=splits)

    def _experts(
        self, layer: int, ffn: ExpertWeights, hidden: Tensor, normed: Tensor, next_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        moe = self.session.model.shape.moe
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
        eps = self.session.model.shape.norm_eps
        return join_experts(out, places, weights, shared, hidden, next_norm, eps, self._counts)


def num_splits(pairs: int, capacity: int) -> int:
    """Parts into which attention cuts a lane's keys, for ``pairs`` of (lane, KV head)."""
    wanted = -(-PROGRAMS_WANTED // pairs)
    return max(1, min(wanted, capacity // KEYS_PER_SPLIT, 32))
