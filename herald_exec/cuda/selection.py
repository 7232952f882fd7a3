"""HERALD's selection pass on a GPU: one [MASK] query a row, two graphs a layer with the CPU's selection between them.

The pass is the plain one of :mod:`herald_exec.retrieval`; its launches are so small that issuing them one by one takes
longer than running them, and beside a denoising step they would wait for the interpreter as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.feed_forward import FeedForward
from herald_exec.cuda.graphs import GraphMemory
from herald_exec.cuda.kernels.attention import place_heads
from herald_exec.cuda.kernels.norms import add_norm
from herald_exec.cuda.lanes import bucket
from herald_exec.models.layers import Rotary
from herald_exec.pools import Exchange
from herald_exec.requests import Row
from herald_exec.session import Session, Task
from herald_pipeline.pipeline import Pipeline


def has_own_pass(pipeline: Pipeline) -> bool:
    """Whether a method's selection is a pass of its own with one query a row and every layer on the CPU."""
    actions = {stage.action for stage in pipeline.template.stages()}
    whole = {"project", "select", "finish"} <= actions
    return whole and not actions & {"decide", "exact_layer", "proxy"} and pipeline.settings.queries == 1


class SelectionPass:
    """The rows of a pass, and what its layers hand on.

    ``rows`` and ``positions`` are what :func:`herald_exec.retrieval.select` reads of a pass.
    """

    def __init__(self, session: Session, *, graphs: bool) -> None:
        self.session = session
        self.rows: list[Row] = []
        self.positions = torch.zeros(0, 1, dtype=torch.int64)
        slots, shape, device = bucket(session.pools.slots), session.model.shape, session.device
        cuda = device.type == "cuda"
        session.pools.exchange = Exchange(slots, 1, shape, cuda)
        self.feed_forward = FeedForward(session.model)
        self.graphs = graphs and self.feed_forward.capturable
        self._memory = GraphMemory()
        self._captured: dict[int, list[tuple[Any, Any]]] = {}
        self._starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._host_starts = torch.zeros(slots, dtype=torch.int64, pin_memory=cuda)
        self._attended = torch.zeros(slots, shape.num_heads * shape.head_dim, dtype=session.model.dtype, device=device)
        self._state: tuple[Tensor, Tensor, Rotary] | None = None

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

    def close(self) -> None:
        """Free the graphs."""
        self._captured.clear()
        self._state = None
        # A pass points at its session: without this the two would wait for the garbage collector.
        self.session.passes.clear()

    def _begin(self, task: Task) -> None:
        """Take the rows of a new pass: the representative is index B // 2 of the next block (paper section IV-A2)."""
        session, count = self.session, len(task.rows)
        ahead = session.pipeline.template.lookahead * session.block_length + session.block_length // 2
        self.rows = list(task.rows)
        self.positions = torch.tensor([[row.prefix + ahead] for row in task.rows])
        self._host_starts[:count] = self.positions[:, 0]
        self._starts.copy_(self._host_starts, non_blocking=True)
        session.passes[task.stage.stream] = self
        lanes = bucket(count)
        if self.graphs and lanes not in self._captured:
            self._capture(lanes)

    def _replay(self, at: int) -> None:
        lanes = bucket(len(self.rows))
        if self.graphs:
            self._captured[lanes][at][0].replay()
        else:
            self._run(at, lanes)

    def _capture(self, lanes: int) -> None:
        parts = range(2 * self.session.num_layers)
        for at in parts:
            self._run(at, lanes)
        kept = []
        for at in parts:
            graph, _ = self._memory.capture(lambda at=at: self._run(at, lanes))  # type: ignore[misc]
            # What a part leaves for the next ones must stay in place.
            kept.append((graph, self._state))
        self._captured[lanes] = kept

    def _run(self, at: int, lanes: int) -> None:
        """Part ``at`` of the pass: projections of layer ``at // 2``, or what follows its selection."""
        layer, after = divmod(at, 2)
        if after:
            self._finish(layer, lanes)
        else:
            self._project(layer, lanes)

    def _project(self, layer: int, lanes: int) -> None:
        model, exchange = self.session.model, self.session.pools.exchange
        assert exchange is not None
        shape, weights = model.shape, model.weights.layers[layer]
        if layer == 0:
            starts = self._starts[:lanes]
            embedded = model.embed(torch.full_like(starts, shape.mask_token_id))
            self._state = (*add_norm(embedded, None, weights.input_norm, shape.norm_eps), model.rotary(starts))
        assert self._state is not None
        _, normed, rotary = self._state
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        heads = (shape.num_heads, shape.num_kv_heads)
        parts = place_heads(joined, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, lanes, heads)
        for host, part in zip((exchange.q, exchange.k, exchange.v), parts, strict=True):
            # With one query a row, folded heads lie as the kernel reads them.
            host[:lanes].copy_(part.float().view(lanes, 1, -1, shape.head_dim), non_blocking=True)

    def _finish(self, layer: int, lanes: int) -> None:
        exchange = self.session.pools.exchange
        assert exchange is not None
        assert self._state is not None
        hidden, _, rotary = self._state
        output = exchange.output[:lanes].flatten(1).to(self.session.device, non_blocking=True)
        attended = self._attended[:lanes]
        attended.copy_(output)
        self._state = (*self.feed_forward(layer, hidden, attended), rotary)
