"""HERALD's selection pass on a GPU: one [MASK] query a row, two graphs a layer with the CPU's selection between them.

The pass is the plain one of :mod:`herald_exec.retrieval`; its launches are so small that issuing them one by one takes
longer than running them, and beside a denoising step they would wait for the interpreter as well.

The graphs are captured once, at prefill and for all slots: nothing is captured or allocated while decoding. A pass of
fewer rows runs with lanes that nobody reads. With ``exact_layers_on=gpu`` an exact layer is one graph, without the CPU.
"""

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.feed_forward import FeedForward
from herald_exec.cuda.forward import launch_shape
from herald_exec.cuda.graphs import GraphMemory
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.kernels.norms import add_norm
from herald_exec.cuda.kernels.placing import place_heads
from herald_exec.cuda.lanes import bucket
from herald_exec.models.layers import Rotary
from herald_exec.pools import Exchange
from herald_exec.requests import Row
from herald_exec.session import Session, Task
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Region


def has_own_pass(pipeline: Pipeline) -> bool:
    """Whether a method's selection is a pass of its own with one query a row, scored on the CPU."""
    actions = {stage.action for stage in pipeline.template.stages()}
    whole = {"project", "select", "finish"} <= actions
    return whole and not actions & {"decide", "proxy"} and pipeline.settings.queries == 1


class SelectionPass:
    """The rows of a pass, and what its layers hand on.

    ``rows`` and ``positions`` are what :func:`herald_exec.retrieval.select` reads of a pass.
    """

    def __init__(self, session: Session, feed_forward: FeedForward, *, graphs: bool) -> None:
        self.session = session
        self.rows: list[Row] = []
        self.positions = torch.zeros(0, 1, dtype=torch.int64)
        shape, device = session.model.shape, session.device
        cuda, self.lanes = device.type == "cuda", bucket(session.rows_together)
        session.pools.exchange = Exchange(self.lanes, 1, shape, cuda)
        self.feed_forward = feed_forward
        self.graphs = graphs and self.feed_forward.capturable
        self._memory = GraphMemory()
        self._captured: dict[int, tuple[Any, Any]] = {}
        self._table = torch.zeros(len(_Of), self.lanes, dtype=torch.int32, device=device)
        self._host_table = torch.zeros(len(_Of), self.lanes, dtype=torch.int32, pin_memory=cuda)
        width = shape.num_heads * shape.head_dim
        self._attended = torch.zeros(self.lanes, width, dtype=session.model.dtype, device=device)
        self._state: tuple[Tensor, Tensor, Rotary] | None = None
        stages = {stage.action: stage.layers for stage in session.pipeline.template.stages()}
        self._whole = frozenset(stages.get("exact_layer", ()))
        """Layers that attend on the GPU."""

    def exact_layer(self, session: Session, task: Task) -> None:
        """One exact layer of the pass on the GPU, over the prefix kept there."""
        task.require(task.reads("exact", Region.PREFIX), "reading the exact pool")
        if task.layer == 0:
            self._begin(task)
        self._replay(2 * task.layer)
        task.num_bytes += sum(row.prefix + 1 for row in self.rows) * session.entry_bytes()

    def project(self, session: Session, task: Task) -> None:
        """Queries and their own KV of one layer, to pinned memory in fp32."""
        task.require(task.writes("query"), "writing the queries")
        if task.layer == 0:
            self._begin(task)
        self._replay(2 * task.layer)

    def finish(self, session: Session, task: Task) -> None:
        """Attention output back to the device, then output projection and feed-forward."""
        task.require(task.reads("output"), "reading the attention output")
        self._replay(2 * task.layer + 1)

    def prepare(self) -> None:
        """Capture the graphs of all layers, before decoding begins and while no pass is under way.

        On a stream of the retrieval stream's priority: a graph's kernels keep that of the stream they are captured on.
        """
        if not self.graphs or self._captured:
            return
        main, side = torch.cuda.current_stream(), torch.cuda.Stream(self.session.device, priority=-1)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for at in self._parts():
                self._run(at)
            for at in self._parts():
                graph, _ = self._memory.capture(lambda at=at: self._run(at))  # type: ignore[misc]
                # What a part leaves for the next ones must stay in place.
                self._captured[at] = (graph, self._state)
        main.wait_stream(side)

    def close(self) -> None:
        """Free the graphs."""
        self._captured.clear()
        self._state = None
        # A pass points at its session: without this the two would wait for the garbage collector.
        self.session.passes.clear()

    def _begin(self, task: Task) -> None:
        """Take the rows of a new pass: the representative is index B // 2 of the next block (paper section IV-A2)."""
        session = self.session
        ahead = session.pipeline.template.lookahead * session.block_length + session.block_length // 2
        self.rows = list(task.rows)
        starts = [row.prefix + ahead for row in self.rows]
        self.positions = torch.tensor(starts)[:, None]
        told = self._host_table.numpy()
        told[:] = 0
        told[:, : len(starts)] = np.array([starts, [row.slot for row in self.rows], [row.prefix for row in self.rows]])
        self._table.copy_(self._host_table, non_blocking=True)
        session.passes[task.stage.stream] = self

    def _parts(self) -> list[int]:
        """Parts of a pass in their order; an exact layer on the GPU has one, the others two."""
        layers = range(self.session.num_layers)
        return [2 * layer + after for layer in layers for after in ((0,) if layer in self._whole else (0, 1))]

    def _replay(self, at: int) -> None:
        if self.graphs:
            self._captured[at][0].replay()
        else:
            self._run(at)

    def _run(self, at: int) -> None:
        """Part ``at`` of the pass: what layer ``at // 2`` does before its selection, or after it."""
        layer, after = divmod(at, 2)
        if layer == 0 and not after:
            self._enter()
        if after:
            self._finish(layer)
        elif layer in self._whole:
            self._attend(layer)
        else:
            self._project(layer)

    def _enter(self) -> None:
        """[MASK] embeddings at the rows' positions, and their first norm."""
        model, starts = self.session.model, self._table[_Of.START].long()
        embedded = model.embed(torch.full_like(starts, model.shape.mask_token_id))
        first_norm = model.weights.layers[0].input_norm
        self._state = (*add_norm(embedded, None, first_norm, model.shape.norm_eps), model.rotary(starts))

    def _place(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, own keys and own values of a layer, normed and turned."""
        model = self.session.model
        shape, weights = model.shape, model.weights.layers[layer]
        assert self._state is not None
        _, normed, rotary = self._state
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        heads = (shape.num_heads, shape.num_kv_heads)
        return place_heads(joined, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, self.lanes, heads)

    def _project(self, layer: int) -> None:
        exchange = self.session.pools.exchange
        assert exchange is not None
        for host, part in zip((exchange.q, exchange.k, exchange.v), self._place(layer), strict=True):
            # With one query a row, folded heads lie as the kernel reads them.
            host.copy_(part.float().view(host.shape), non_blocking=True)

    def _attend(self, layer: int) -> None:
        store, (q, *own) = self.session.pools.stores["exact"], self._place(layer)
        pool, shaped = store.layer(layer), launch_shape(q.shape[0] * q.shape[1], store.capacity)
        rows, lengths = self._table[_Of.SLOT], self._table[_Of.PREFIX]
        found = attend_lanes(q, pool.keys, pool.values, (own[0], own[1]), rows, lengths, paired=False, **shaped)
        self._leave(layer, found)

    def _finish(self, layer: int) -> None:
        exchange = self.session.pools.exchange
        assert exchange is not None
        output = exchange.output.flatten(1).to(self.session.device, non_blocking=True)
        self._leave(layer, self._attended.copy_(output))

    def _leave(self, layer: int, attended: Tensor) -> None:
        """What follows attention: the hidden states with which the next layer begins."""
        assert self._state is not None
        hidden, _, rotary = self._state
        self._state = (*self.feed_forward(layer, hidden, attended), rotary)


class _Of(IntEnum):
    """Rows of a pass's table: the query's position, and where the row's prefix lies."""

    START = 0
    SLOT = 1
    PREFIX = 2
