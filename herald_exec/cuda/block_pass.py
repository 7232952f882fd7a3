"""A step 0 that selects on the CPU with the whole block (MAGE), around the CPU's selection on fused operations.

The plain pass of :mod:`herald_exec.retrieval` launches its norms, rotations and experts one by one: project and finish
took 5.3 ms a layer there for 16 blocks of 32 tokens (llada2-mini on an H200), and 2.9 fused, launched one by one.
A full batch's are graphs, two a layer, and so are both halves' where two take turns; a pass of fewer rows is launched
one by one.

The pass has a stream of its own, on which the next one may begin before :meth:`BlockPass.decide` has its turn on the
main stream. So nothing but ``pools.hidden``, where each slot has its own place, leads from the one to the other: lane
table, counters of the experts and graphs are the pass's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.acceptance import Acceptance
from herald_exec.cuda.forward import LaneForward
from herald_exec.cuda.graphs import GraphMemory
from herald_exec.cuda.lanes import Field
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.models.layers import Rotary
from herald_exec.requests import Row
from herald_exec.session import Action, Session, Task
from herald_pipeline.pipeline import Pipeline


def has_block_pass(pipeline: Pipeline) -> bool:
    """Whether step 0 is a pass of whole blocks, on a stream of its own, that attends on the CPU in every layer."""
    actions = {stage.action for stage in pipeline.template.stages()}
    whole = {"project", "select", "finish", "decide"} <= actions and "hidden" in {p.name for p in pipeline.pools}
    return (
        whole and not actions & {"exact_layer", "proxy"} and pipeline.settings.queries == pipeline.settings.block_length
    )


class BlockPass:
    """The rows of a step 0, and what its layers hand on.

    ``rows`` and ``positions`` are what :func:`herald_exec.retrieval.select` reads of a pass; ``forward`` is the pass's
    own, ``acceptance`` that of the steps behind it.
    """

    def __init__(self, session: Session, forward: LaneForward, acceptance: Acceptance, *, graphs: bool) -> None:
        self.session, self.forward, self.acceptance = session, forward, acceptance
        self.rows: list[Row] = []
        self.positions = torch.zeros(0, session.block_length, dtype=torch.int64)
        self._state: tuple[Tensor, Tensor, Rotary] | None = None
        self.graphs = graphs and forward.feed_forward.capturable
        self._memory = GraphMemory()
        self._captured: dict[int, list[Any]] = {}
        """Graphs of a pass by its rows."""

    def table(self) -> dict[str, Action]:
        """Action name -> function."""
        return {"project": self.project, "finish": self.finish, "decide": self.decide}

    def project(self, session: Session, task: Task) -> None:
        """The blocks' queries and own KV of one layer, to pinned memory in fp32."""
        task.require(task.writes("query"), "writing the queries")
        if task.layer == 0:
            self._begin(task)
        self._replay(2 * task.layer)

    def finish(self, session: Session, task: Task) -> None:
        """Attention output back to the device, then output projection and feed-forward."""
        task.require(task.reads("output"), "reading the attention output")
        if task.layer == session.num_layers - 1:
            task.require(task.writes("hidden"), "leaving the last hidden states")
        self._replay(2 * task.layer + 1)

    def decide(self, session: Session, task: Task) -> Callable[[], Outcome] | Foreseen:
        """LM head and acceptance, as behind a forward of one launch."""
        task.require(task.reads("hidden"), "reading the last hidden states")
        rows, table, hidden = list(task.rows), self.acceptance.table, session.pools.hidden
        assert hidden is not None
        table.fill(session, rows, len(rows))
        total = self.acceptance.prepare(rows)
        table.send()
        normed = hidden.index_select(0, table[Field.SLOT][: len(rows)]).flatten(0, 1)
        return self.acceptance.issue(rows, normed, total)

    def prepare(self) -> None:
        """Capture the graphs of full batches, before decoding begins and while no pass is under way.

        On a stream of the retrieval stream's priority: a graph's kernels keep that of the stream they are captured on.
        """
        if not self.graphs or self._captured:
            return
        main, side = torch.cuda.current_stream(), torch.cuda.Stream(self.session.device, priority=-1)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for lanes in self.session.full_batches:
                self._capture(lanes)
        main.wait_stream(side)

    def _capture(self, lanes: int) -> None:
        parts = range(2 * self.session.num_layers)
        for at in parts:
            self._run(at, lanes)
        # What a part leaves may be used again where all later parts follow; what the last one leaves is in the pool.
        self._captured[lanes] = [
            self._memory.capture(lambda at=at: self._run(at, lanes))[0]  # type: ignore[misc]
            for at in parts
        ]
        self._state = None

    def close(self) -> None:
        """Free the graphs, and what the last pass has left."""
        self._captured.clear()
        self._state = None
        # A pass points at its session: without this the two would wait for the garbage collector.
        self.session.passes.clear()

    def _begin(self, task: Task) -> None:
        """Take the rows of a new pass."""
        session, table = self.session, self.forward.table
        self.rows = list(task.rows)
        for row in self.rows:
            session.state.begin(row)
        self.positions = _positions(self.rows, session.block_length)
        table.fill(session, self.rows, len(self.rows))
        table.send()
        session.passes[task.stage.stream] = self

    def _replay(self, at: int) -> None:
        captured = self._captured.get(len(self.rows))
        if captured is None:
            self._run(at, len(self.rows))
        else:
            captured[at].replay()

    def _run(self, at: int, lanes: int) -> None:
        """Part ``at`` of the pass: what layer ``at // 2`` does before its selection, or after it."""
        layer, after = divmod(at, 2)
        if after:
            self._finish(layer, lanes)
            return
        if layer == 0:
            self._state = self.forward.enter(lanes)
        self._project(layer, lanes)

    def _project(self, layer: int, lanes: int) -> None:
        exchange, weights = self.session.pools.exchange, self.session.model.weights.layers[layer]
        assert self._state is not None
        assert exchange is not None
        _, normed, rotary = self._state
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        placed = self.forward.place(layer, lanes, joined, rotary, None)
        for host, part in zip((exchange.q, exchange.k, exchange.v), placed, strict=True):
            host[:lanes].copy_(by_token(part, self.session.block_length), non_blocking=True)

    def _finish(self, layer: int, lanes: int) -> None:
        exchange, model = self.session.pools.exchange, self.session.model
        assert self._state is not None
        assert exchange is not None
        hidden, _, rotary = self._state
        landed = exchange.output[:lanes].to(self.session.device, non_blocking=True)
        attended = landed.to(model.dtype).view(len(hidden), -1)
        hidden, normed = self.forward.feed_forward(layer, hidden, attended)
        self._state = (hidden, normed, rotary)
        if layer == self.session.num_layers - 1:
            left = self.session.pools.hidden
            assert left is not None
            left.index_copy_(0, self.forward.table[Field.SLOT][:lanes].long(), normed.view(lanes, *left.shape[1:]))


def by_token(heads: Tensor, block: int) -> Tensor:
    """Folded heads ``[lanes, kv, B * G, d]`` as the CPU reads them: ``[lanes, B, kv * G, d]`` fp32, contiguous."""
    lanes, kv, _, dim = heads.shape
    parted = heads.view(lanes, kv, block, -1, dim).transpose(1, 2)
    return parted.to(torch.float32, memory_format=torch.contiguous_format).reshape(lanes, block, -1, dim)


def _positions(rows: Sequence[Row], block: int) -> Tensor:
    return torch.tensor([row.prefix for row in rows])[:, None] + torch.arange(block)
