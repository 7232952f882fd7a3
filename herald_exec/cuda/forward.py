"""One forward of lanes through all layers as a CUDA graph: the numbers of :class:`herald_exec.blocks.BlockForward`.

A layer is twelve launches (seven with a dense feed-forward): QKV, heads into place, attention, output projection,
residual and norm, router, routing, permutation, two grouped matmuls around SiLU, shared experts, weighted sum and norm.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.blocks import source
from herald_exec.cuda.feed_forward import FeedForward
from herald_exec.cuda.graphs import GraphMemory
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.kernels.norms import add_norm
from herald_exec.cuda.kernels.placing import place_heads
from herald_exec.cuda.lanes import Field, LaneTable, bucket
from herald_exec.models.layers import Rotary
from herald_exec.pools import KV
from herald_exec.session import Session

MULTIPROCESSORS = 132
"""Of an H100 SXM or H200: each runs one program of an attention launch at a time, so programs come in waves."""
FIXED_KEYS = (96, 340)
"""What a program costs besides its keys, in keys: its queries, own block and output; with splits, parts and merge too.

From the times of one and two splits over 1,670 keys on an H200 (0.120 and 0.133 ms at 320 pairs).
"""
LONG_KEYS = 4096
"""Keys of a program from which on tiles of 128 beat tiles of 64.

On an H200 they cost 8% less a key (two splits of 32,768 keys: 1.423 ms, not 1.552) and some 240 keys more to begin
and end with (1,670 keys: 0.125 ms, not 0.117), so they break even near 2,900; between 1,670 and 16,384 keys nothing
was measured.
"""
KEYS_PER_SPLIT = 256
"""Fewest keys that are worth a split of their own."""
MOST_SPLITS = 32


class LaneForward:
    """Forward of lanes over the pools of a session.

    Parameters
    ----------
    lanes
        Most lanes of one launch.
    graphs
        Capture each number of lanes once and replay it. Without it the launches are issued one by one.
    feed_forward
        What the layers' feed-forwards are done with; default: their own.
    """

    def __init__(self, session: Session, lanes: int, *, graphs: bool, feed_forward: FeedForward | None = None) -> None:
        self.session = session
        self.table = LaneTable(lanes, session.device)
        self.feed_forward = feed_forward or FeedForward(session.model)
        self.graphs = graphs and self.feed_forward.capturable
        self._captured: dict[int, tuple[Any, Tensor]] = {}
        self._memory = GraphMemory()
        self._offsets = torch.arange(session.block_length, device=session.device)
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
        self._captured[lanes] = self._memory.capture(lambda: self.run(lanes))

    def beside(self, lanes: int) -> "LaneForward":
        """One of at most ``lanes`` lanes for another stream, launch by launch, with a lane table of its own."""
        return LaneForward(self.session, lanes, graphs=False, feed_forward=self.feed_forward.beside())

    def close(self) -> None:
        """Free the graphs and their memory."""
        self._captured.clear()

    # One forward -----------------------------------------------------------------------------------------------------

    def run(self, lanes: int) -> Tensor:
        """The forward, launch by launch."""
        hidden, normed, rotary = self.enter(lanes)
        for layer in range(self.session.num_layers):
            hidden, normed = self.layer(layer, lanes, hidden, normed, rotary)
        return normed

    def enter(self, lanes: int) -> tuple[Tensor, Tensor, Rotary]:
        """Hidden states that enter layer 0, their norm, and the lanes' angles."""
        model, state = self.session.model, self.session.state
        slots, starts = (self.table[field][:lanes].long() for field in (Field.SLOT, Field.START))
        positions = starts[:, None] + self._offsets
        tokens, masked = (values[slots[:, None], positions] for values in (state.tokens, state.masked))
        ids = torch.where(masked, model.shape.mask_token_id, tokens)
        ids = torch.where(self.table[Field.IS_DRAFT][:lanes, None] > 0, state.draft[slots], ids)
        rotary = model.rotary(positions.flatten())
        hidden = model.embed(ids.flatten())
        return (*add_norm(hidden, None, model.weights.layers[0].input_norm, model.shape.norm_eps), rotary)

    def layer(self, layer: int, lanes: int, hidden: Tensor, normed: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """A layer, and the norm with which the next one (or the head) begins."""
        weights = self.session.model.weights.layers[layer]
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        return self.feed_forward(layer, hidden, self._attention(layer, lanes, joined, rotary))

    def _attention(self, layer: int, lanes: int, joined: Tensor, rotary: Rotary) -> Tensor:
        session, shape, store = self.session, self.session.model.shape, source(self.session, layer)
        kind = "SPARSE" if store.name == "sparse" else "FULL"
        row, length, store_row, store_at = (
            self.table[Field[f"{kind}_{what}"]][:lanes] for what in ("ROW", "LENGTH", "STORE_ROW", "STORE_AT")
        )
        pool = store.layer(layer)
        q, own_k, own_v = self.place(layer, lanes, joined, rotary, (pool.keys, pool.values, store_row, store_at))
        shaped = launch_shape(lanes * shape.num_kv_heads, store.capacity)
        # More lanes than rows: a step in which drafts go along. A full batch's are exactly twice as many. Few keys
        # are found in the L2 by the second lane (3% on an H200); many are not, and apart they are read 15% faster.
        paired = lanes == 2 * session.rows_together and kind == "SPARSE"
        return attend_lanes(q, pool.keys, pool.values, (own_k, own_v), row, length, paired=paired, **shaped)

    def place(
        self,
        layer: int,
        lanes: int,
        joined: Tensor,
        rotary: Rotary,
        pool: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Folded queries and own KV of a layer; also to ``pool`` and to the buffer from which blocks leave."""
        shape, weights, out = self.session.model.shape, self.session.model.weights.layers[layer], None
        if self._out_store is not None and self._out_store.holds(layer):
            leaving: KV = self._out_store.layer(layer)
            out = (leaving.keys, leaving.values, self.table[Field.OUT_ROW][:lanes])
        return place_heads(
            joined,
            weights.q_norm,
            weights.k_norm,
            rotary,
            shape.norm_eps,
            lanes,
            (shape.num_heads, shape.num_kv_heads),
            pool,
            out,
        )


def launch_shape(pairs: int, capacity: int) -> dict[str, int]:
    """How attention of ``pairs`` of (lane, KV head) over up to ``capacity`` keys is cut into programs.

    The cut whose waves take least: waves of programs times the keys of one and what it costs besides. On an H200 at 320
    pairs two splits read 32,768 keys at 3.8 TB/s, one at 3.0: five waves of half the keys, not three of all of them.
    """

    def cost(splits: int) -> float:
        waves = -(-pairs * splits // MULTIPROCESSORS)
        return waves * (capacity / splits + FIXED_KEYS[splits > 1])

    splits = min(range(1, max(1, min(capacity // KEYS_PER_SPLIT, MOST_SPLITS)) + 1), key=cost)
    return {"splits": splits, "block_n": 128 if capacity / splits >= LONG_KEYS else 64}
