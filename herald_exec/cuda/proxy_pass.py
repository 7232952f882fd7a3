"""Steps whose layers attend to what a proxy on the device picked (``step-fetch``, InfiniGen's step 0).

A layer is two parts, the proxy's and the step's, each one graph; between them rows come from the host. Where the device
fetches the rows itself, what the proxy picked stays there, and nothing waits for the host. Shapes are those of the
largest request, so that no graph depends on a prefix: empty lanes and entries behind a count are not read.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.acceptance import Acceptance
from herald_exec.cuda.forward import LaneForward, launch_shape
from herald_exec.cuda.graphs import GraphMemory
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.kernels.importance import prefix_importance
from herald_exec.cuda.kernels.picking import pick_largest
from herald_exec.cuda.kernels.placing import place_heads
from herald_exec.cuda.lanes import Field, bucket
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.kernels import Selection
from herald_exec.models.layers import Rotary
from herald_exec.requests import Row
from herald_exec.session import Action, Session, Task
from herald_pipeline.pools import Buffer, Region

Part = tuple[Literal["proxy", "step"], int]


class ProxyPass:
    """The rows of a step, and what its layers hand on.

    ``forward`` and ``acceptance`` are those of the steps that are one launch; both kinds share the lane table.
    """

    def __init__(self, session: Session, forward: LaneForward, acceptance: Acceptance, *, graphs: bool) -> None:
        self.session, self.forward, self.acceptance = session, forward, acceptance
        self.lanes = bucket(session.rows_together)
        self.rows: list[Row] = []
        self._total = 0
        self._state: tuple[Tensor, Tensor, Rotary] | None = None
        self._before: Tensor | None = None
        stages = {stage.action: stage for stage in session.pipeline.template.stages()}
        self._leads, self._tells_host = stages["proxy"].lead > 0, "gather" in stages
        self._ring = session.pools.stores.get("fetched")
        places = session.num_layers if self._ring is None else self._ring.buffers
        # A graph writes to one place, so a layer must always have the same one.
        self.graphs = graphs and forward.feed_forward.capturable and session.num_layers % places == 0
        self._places = places
        self._memory = GraphMemory()
        self._captured: dict[Part, Any] = {}
        partial = session.pools.partial
        assert partial is not None
        heads, tokens = partial.keys(0).shape[1:3]
        self._most = session.pipeline.settings.selected_tokens(tokens)
        self._picked = torch.zeros(places, self.lanes, heads, self._most, dtype=torch.int32, device=session.device)
        self._told = torch.zeros(places, 3, self.lanes, dtype=torch.int32, device=session.device)
        pin = session.device.type == "cuda"
        size = self._picked[0].numel() if self._tells_host else 0
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(places)]

    def table(self) -> dict[str, Action]:
        """Action name -> function."""
        step = {"sparse_step": self.sparse_step} if self._ring is None else {"step_layer": self.step_layer}
        return {"proxy": self.proxy, "decide": self.decide, **step}

    def picked(self, task: Task) -> tuple[Tensor, Tensor]:
        """What the proxy picked for a fetch's layer: slots, storage rows, counts ``[3, R]``, and ``[R, kv, k]``."""
        place = self._place(task.turn, task.layer)
        return self._told[place], self._picked[place]

    def prepare(self) -> None:
        """Capture the graphs of all parts on the current stream, before decoding begins."""
        if not self.graphs or self._captured:
            return
        for part in self._parts():
            self._run(part, self._place(part[1], part[1]))
        for part in self._parts():
            place = self._place(part[1], part[1])
            graph, _ = self._memory.capture(lambda part=part, place=place: self._run(part, place))  # type: ignore[misc]
            # What the last part leaves stays in place; the others' is used again once the parts that read it are over.
            self._captured[part] = graph

    def close(self) -> None:
        """Free the graphs and what the last step has left."""
        self._captured.clear()
        self._state = self._before = None

    # Launches --------------------------------------------------------------------------------------------------------

    def proxy(self, session: Session, task: Task) -> None:
        """Entries of a layer, picked by queries that are speculated from what entered the layer before."""
        written = task.writes("picked") or task.writes("indices", buffer=Buffer.RING)
        task.require(task.reads("partial", Region.PREFIX) and written, "scoring partial keys")
        if task.layer == 0:
            self._begin(task)
        place = self._place(task.turn, task.layer)
        self._replay(("proxy", task.layer), place)
        if self._tells_host:
            self._tell(task, place)
        assert session.pools.partial is not None
        width = session.pools.partial.keys(task.layer).shape[-1] * session.entry_bytes()
        task.num_bytes += sum(row.prefix for row in self.rows) * (width // (2 * session.model.shape.head_dim))

    def step_layer(self, session: Session, task: Task) -> None:
        """A layer over the picked entries in the ring; completed blocks leave their clean KV and partial keys."""
        task.require(task.reads("fetched", buffer=Buffer.RING), "reading the fetched layer")
        self._replay(("step", task.layer), self._place(task.turn, task.layer))
        self._keep_completed(task)
        self._count(task, sum(row.to_select for row in self.rows))

    def sparse_step(self, session: Session, task: Task) -> None:
        """A layer over what has been fetched to the sparse pool."""
        task.require(task.reads("sparse", Region.SELECTED), "reading the selected entries")
        task.require(task.writes("sparse", Region.SCRATCH), "writing the block's own KV")
        self._replay(("step", task.layer), task.layer)
        self._count(task, sum(row.selected + row.tail for row in self.rows))

    def decide(self, session: Session, task: Task) -> Callable[[], Outcome] | Foreseen:
        """LM head and acceptance, as behind a forward of one launch."""
        assert self._state is not None
        return self.acceptance.issue(self.rows, self._state[1], self._total)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Part]:
        """Parts of a step in the order in which they are launched."""
        found: list[Part] = []
        last = self.session.num_layers - 1
        for layer in range(last + 1):
            if self._leads:
                found += [("proxy", ahead) for ahead in ((0, 1) if layer == 0 else (layer + 1,)) if ahead <= last]
            else:
                found.append(("proxy", layer))
            found.append(("step", layer))
        return found

    def _place(self, turn: int, layer: int) -> int:
        return layer if self._ring is None else turn % self._places

    def _replay(self, part: Part, place: int) -> None:
        if self._captured:
            self._captured[part].replay()
        else:
            self._run(part, place)

    def _run(self, part: Part, place: int) -> None:
        which, layer = part
        if which == "proxy":
            self._pick(layer, place)
        else:
            self._attend(layer, place)

    def _begin(self, task: Task) -> None:
        """Take the rows of a new step, and fill the lane table."""
        self.rows, table = list(task.rows), self.forward.table
        for row in self.rows:
            self.session.state.begin(row)
        table.fill(self.session, self.rows, self.lanes)
        self._total = self.acceptance.prepare(self.rows)
        table.send()

    def _pick(self, layer: int, place: int) -> None:
        """Ascending positions of each row's largest speculated weights, and where its fetched rows go."""
        model, table, partial, lanes = self.session.model, self.forward.table, self.session.pools.partial, self.lanes
        assert partial is not None
        if layer == 0:
            self._state = self.forward.enter(lanes)
        assert self._state is not None
        _, newest, rotary = self._state
        # What entered the layer before, normed as it was there; of a stage that leads it is the newest there is.
        entered = newest if self._leads or layer == 0 else self._before
        assert entered is not None
        shape, weights = model.shape, model.weights.layers[layer]
        joined = functional.linear(entered, weights.qkv, weights.qkv_bias)
        heads = (shape.num_heads, shape.num_kv_heads)
        q, _, _ = place_heads(joined, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, lanes, heads)
        slots, counts = (table[field][:lanes] for field in (Field.SLOT, Field.TO_SELECT))
        queries = q @ partial.columns[layer][slots.long()]
        keys, lengths = partial.keys(layer).mT, table[Field.START][:lanes]
        found = prefix_importance(queries, keys, slots, lengths, shape.head_dim**-0.5)
        pick_largest(found, lengths, counts, self._picked[place])
        to = table[Field.SPARSE_ROW][:lanes] if self._ring is None else slots + self._ring.row(0, place)
        for told, values in zip(self._told[place], (slots, to, counts), strict=True):
            told.copy_(values)

    def _attend(self, layer: int, place: int) -> None:
        assert self._state is not None
        hidden, normed, rotary = self._state
        self._before = normed
        if self._ring is None:
            self._state = (*self.forward.layer(layer, self.lanes, hidden, normed, rotary), rotary)
            return
        forward, lanes, weights = self.forward, self.lanes, self.session.model.weights.layers[layer]
        first, slots = self._ring.row(0, place), self.session.pools.slots
        keys, values = (part[first : first + slots] for part in self._ring.layer(layer))
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        q, *own = forward.place(layer, lanes, joined, rotary, None)
        rows, lengths = (forward.table[field][:lanes] for field in (Field.SLOT, Field.TO_SELECT))
        shaped = launch_shape(q.shape[0] * q.shape[1], self._ring.capacity)
        attended = attend_lanes(q, keys, values, (own[0], own[1]), rows, lengths, paired=False, **shaped)
        self._state = (*forward.feed_forward(layer, hidden, attended), rotary)

    # Host ------------------------------------------------------------------------------------------------------------

    def _tell(self, task: Task, place: int) -> None:
        """The picked positions to pinned memory, where the CPU's gather reads them once the device has passed this."""
        counts = [row.to_select for row in self.rows]
        part = self._picked[place][: len(counts), :, : max(counts)].contiguous()
        host = self._host[place][: part.numel()].view(part.shape)
        host.copy_(part, non_blocking=True)
        per_head = np.repeat(np.array(counts, np.int32)[:, None], part.shape[1], axis=1)
        found = Selection(np.empty((0,), np.float32), host.numpy(), per_head, np.zeros_like(per_head, np.uint8))
        self.session.pools.indices[task.layer, self.rows[0].slot] = found

    def _keep_completed(self, task: Task) -> None:
        done = [row for row in self.rows if row.mode.completes]
        if not done:
            return
        task.require(task.writes("clean") and task.writes("partial", Region.BLOCK), "writing completed blocks")
        keep_partial(self.session, task.layer, done)

    def _count(self, task: Task, entries: int) -> None:
        own = len(self.rows) * self.session.block_length
        task.num_bytes += (entries + own) * self.session.entry_bytes()


def keep_partial(session: Session, layer: int, done: Sequence[Row]) -> None:
    """Partial keys of completed blocks, out of the clean KV that the layer has left."""
    pools = session.pools
    assert pools.partial is not None
    slots, starts = [row.slot for row in done], [row.prefix for row in done]
    pools.partial.write_blocks(layer, slots, starts, pools.stores["clean"].layer(layer).keys[slots])


def has_proxy(session: Session) -> bool:
    """Whether steps attend to what a proxy on the device picks."""
    return any(stage.action == "proxy" for stage in session.pipeline.template.stages())
