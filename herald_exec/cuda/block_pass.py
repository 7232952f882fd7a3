"""A step 0 that selects on the CPU with the whole block (MAGE), around the CPU's selection on fused operations.

The plain pass of :mod:`herald_exec.retrieval` launches its norms, rotations and experts one by one: project and finish
took 5.3 ms a layer there for 16 blocks of 32 tokens (llada2-mini on an H200).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.acceptance import Acceptance
from herald_exec.cuda.forward import LaneForward
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.models.layers import Rotary
from herald_exec.requests import Row
from herald_exec.session import Action, Session, Task
from herald_pipeline.pipeline import Pipeline


def has_block_pass(pipeline: Pipeline) -> bool:
    """Whether step 0 is a pass of whole blocks that attends on the CPU in every layer."""
    actions = {stage.action for stage in pipeline.template.stages()}
    whole = {"project", "select", "finish", "decide"} <= actions
    return (
        whole and not actions & {"exact_layer", "proxy"} and pipeline.settings.queries == pipeline.settings.block_length
    )


class BlockPass:
    """The rows of a step 0, and what its layers hand on.

    ``rows`` and ``positions`` are what :func:`herald_exec.retrieval.select` reads of a pass; ``forward`` and
    ``acceptance`` are those of the steps behind it, whose lane table it shares.
    """

    def __init__(self, session: Session, forward: LaneForward, acceptance: Acceptance) -> None:
        self.session, self.forward, self.acceptance = session, forward, acceptance
        self.rows: list[Row] = []
        self.positions = torch.zeros(0, session.block_length, dtype=torch.int64)
        self._total = 0
        self._state: tuple[Tensor, Tensor, Rotary] | None = None

    def table(self) -> dict[str, Action]:
        """Action name -> function."""
        return {"project": self.project, "finish": self.finish, "decide": self.decide}

    def project(self, session: Session, task: Task) -> None:
        """The blocks' queries and own KV of one layer, to pinned memory in fp32."""
        task.require(task.writes("query"), "writing the queries")
        if task.layer == 0:
            self._begin(task)
        assert self._state is not None
        lanes, exchange, (_, normed, rotary) = len(self.rows), session.pools.exchange, self._state
        assert exchange is not None
        weights = session.model.weights.layers[task.layer]
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        placed = self.forward.place(task.layer, lanes, joined, rotary, None)
        for host, part in zip((exchange.q, exchange.k, exchange.v), placed, strict=True):
            host[:lanes].copy_(by_token(part, session.block_length), non_blocking=True)

    def finish(self, session: Session, task: Task) -> None:
        """Attention output back to the device, then output projection and feed-forward."""
        task.require(task.reads("output"), "reading the attention output")
        exchange = session.pools.exchange
        assert exchange is not None
        assert self._state is not None
        hidden, _, rotary = self._state
        landed = exchange.output[: len(self.rows)].to(session.device, non_blocking=True)
        attended = landed.to(session.model.dtype).view(len(hidden), -1)
        self._state = (*self.forward.feed_forward(task.layer, hidden, attended), rotary)

    def decide(self, session: Session, task: Task) -> Callable[[], Outcome] | Foreseen:
        """LM head and acceptance, as behind a forward of one launch."""
        assert self._state is not None
        return self.acceptance.issue(self.rows, self._state[1], self._total)

    def close(self) -> None:
        """Free what the last pass has left."""
        self._state = None
        # A pass points at its session: without this the two would wait for the garbage collector.
        self.session.passes.clear()

    def _begin(self, task: Task) -> None:
        """Take the rows of a new pass, and fill the lane table that the steps use too."""
        session, table = self.session, self.forward.table
        self.rows = list(task.rows)
        for row in self.rows:
            session.state.begin(row)
        self.positions = _positions(self.rows, session.block_length)
        table.fill(session, self.rows, len(self.rows))
        self._total = self.acceptance.prepare(self.rows)
        table.send()
        self._state = self.forward.enter(len(self.rows))
        session.passes[task.stage.stream] = self


def by_token(heads: Tensor, block: int) -> Tensor:
    """Folded heads ``[lanes, kv, B * G, d]`` as the CPU reads them: ``[lanes, B, kv * G, d]`` fp32, contiguous."""
    lanes, kv, _, dim = heads.shape
    parted = heads.view(lanes, kv, block, -1, dim).transpose(1, 2)
    return parted.to(torch.float32, memory_format=torch.contiguous_format).reshape(lanes, block, -1, dim)


def _positions(rows: Sequence[Row], block: int) -> Tensor:
    return torch.tensor([row.prefix for row in rows])[:, None] + torch.arange(block)
