"""Steps that go layer by layer over KV fetched from host memory: page-locked pages, whole heads a copy, fused layers.

The host's pages are page-locked where they lie, so a copy runs at the link's rate and by itself. A row's layer is one
run of pages, or one a head where the row does not fill them; the device parts keys and values behind the copy.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from herald_exec.cuda.acceptance import Acceptance
from herald_exec.cuda.forward import LaneForward, launch_shape
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.lanes import Field
from herald_exec.cuda.streams import Foreseen
from herald_exec.denoising import Outcome
from herald_exec.kernels import PAGE_TOKENS
from herald_exec.models.layers import Rotary
from herald_exec.pools import KV
from herald_exec.prefill import folded_importance, top_positions
from herald_exec.requests import Row
from herald_exec.retrieval import write_selected
from herald_exec.session import Action, Session, Task
from herald_pipeline.errors import RunError
from herald_pipeline.pools import Buffer, Region


def fetches(session: Session) -> bool:
    """Whether layers' full KV is brought to the device by copies alone."""
    return any(stage.action == "fetch" for stage in session.pipeline.template.stages())


class FetchedForward:
    """A step whose layers are separate launches on the main stream, each over a place of the ring ``fetched``.

    ``forward`` and ``acceptance`` are those of the steps that are one launch; both kinds share the lane table.

    Raises
    ------
    RunError
        The host's pages cannot be page-locked.
    """

    def __init__(self, session: Session, forward: LaneForward, acceptance: Acceptance) -> None:
        self.session, self.forward, self.acceptance = session, forward, acceptance
        self.rows: list[Row] = []
        self._total = 0
        self._state: tuple[Tensor, Tensor, Rotary] | None = None
        pages = session.pools.hosts["full"].pages
        row_size = pages.num_kv_heads * pages.capacity_tokens * 2 * pages.head_dim
        self._landing = torch.empty(row_size, dtype=session.model.kv_dtype, device=session.device)
        self._locked = 0
        if session.device.type == "cuda":
            pages.first_touch()  # spread over the nodes of the workers; pinning alone would put it all on one
            self._locked = page_lock(pages.address, pages.nbytes)

    def table(self) -> dict[str, Action]:
        """Action name -> function."""
        return {
            "fetch": self.fetch,
            "exact_step": self.exact_step,
            "select_step": self.select_step,
            "step_layer": self.step_layer,
            "decide": self.decide,
        }

    def close(self) -> None:
        """Unlock the pages, before they are unmapped; safe to call twice."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
        self._locked, self._state = 0, None

    # Copy stream -----------------------------------------------------------------------------------------------------

    def fetch(self, session: Session, task: Task) -> None:
        """A layer's full KV of every row from host memory into the next place of the ring."""
        declared = task.reads("full", Region.PREFIX) and task.writes("fetched", buffer=Buffer.RING)
        task.require(declared, "fetching a layer")
        ring, full = session.pools.stores["fetched"], session.pools.hosts["full"]
        place, target = task.turn % ring.buffers, ring.layer(task.layer)
        for row in task.rows:
            if not row.prefix:
                continue
            self._land(full.stored_pages(task.layer, row.slot, row.prefix), target, ring.row(row.slot, place), row)
            task.num_bytes += row.prefix * session.entry_bytes()

    def _land(self, pages: Tensor, target: KV, at: int, row: Row) -> None:
        """Pages ``[kv, pages, 2, 64, d]`` of a row over the link, then keys and values to where attention reads."""
        landed = self._landing[: pages.numel()].view(pages.shape)
        if pages.is_contiguous():
            landed.copy_(pages, non_blocking=True)
        else:
            for to, head in zip(landed, pages, strict=True):
                to.copy_(head, non_blocking=True)
        whole, rest = divmod(row.prefix, PAGE_TOKENS)
        for which, part in enumerate(target):
            taken = part[at, :, : whole * PAGE_TOKENS]
            taken.view(len(taken), whole, PAGE_TOKENS, taken.shape[-1]).copy_(landed[:, :whole, which])
            if rest:
                part[at, :, whole * PAGE_TOKENS : row.prefix] = landed[:, whole, which, :rest]

    # Main stream -----------------------------------------------------------------------------------------------------

    def exact_step(self, session: Session, task: Task) -> None:
        """A layer over the prefix that is kept on the device."""
        hidden, normed, rotary = self._enter(task)
        task.require(task.reads("exact", Region.PREFIX), "reading the exact pool")
        self._state = (*self.forward.layer(task.layer, len(self.rows), hidden, normed, rotary), rotary)
        self._count(task)

    def step_layer(self, session: Session, task: Task) -> None:
        """A layer of a step over the fetched prefix; completed blocks leave their clean KV for the host."""
        self._over_ring(task)

    def select_step(self, session: Session, task: Task) -> None:
        """A layer of step 0 over the fetched KV; its most important entries become the sparse pool's."""
        q, own, prefix = self._over_ring(task)
        for i, row in enumerate(self.rows):
            if not row.to_select:
                continue
            kv = KV(*(part[row.slot : row.slot + 1, :, : row.prefix] for part in prefix))
            lane = KV(*(part[i : i + 1] for part in own))
            selected = top_positions(folded_importance(q[i : i + 1], kv, lane), row.to_select)
            index = selected[..., None].expand(-1, -1, -1, kv.keys.shape[-1])
            write_selected(session, task, [row], KV(kv.keys.gather(2, index), kv.values.gather(2, index)), selected)

    def decide(self, session: Session, task: Task) -> Callable[[], Outcome] | Foreseen:
        """LM head and acceptance, as behind a forward of one launch."""
        assert self._state is not None
        return self.acceptance.issue(self.rows, self._state[1], self._total)

    def _over_ring(self, task: Task) -> tuple[Tensor, KV, KV]:
        """One layer; its folded queries, the lanes' own KV, and the ring's place by slot."""
        hidden, normed, rotary = self._enter(task)
        session, forward, lanes = self.session, self.forward, len(self.rows)
        task.require(task.reads("fetched", buffer=Buffer.RING), "reading the fetched layer")
        ring, slots = session.pools.stores["fetched"], session.pools.slots
        first = task.turn % ring.buffers * slots
        prefix = KV(*(part[first : first + slots] for part in ring.layer(task.layer)))
        weights = session.model.weights.layers[task.layer]
        joined = functional.linear(normed, weights.qkv, weights.qkv_bias)
        q, *own = forward.place(task.layer, lanes, joined, rotary, None)
        rows, lengths = (forward.table[field][:lanes] for field in (Field.FULL_ROW, Field.FULL_LENGTH))
        shaped = launch_shape(q.shape[0] * q.shape[1], ring.capacity)
        attended = attend_lanes(q, prefix.keys, prefix.values, (own[0], own[1]), rows, lengths, paired=False, **shaped)
        self._state = (*forward.feed_forward(task.layer, hidden, attended), rotary)
        self._count(task)
        return q, KV(*own), prefix

    def _enter(self, task: Task) -> tuple[Tensor, Tensor, Rotary]:
        """What enters the layer; layer 0 begins the step."""
        if task.layer == 0:
            self.rows = list(task.rows)
            for row in self.rows:
                self.session.state.begin(row)
            if any(row.mode.completes for row in self.rows):
                task.require(task.writes("clean"), "writing clean KV")
            self.forward.table.fill(self.session, self.rows, len(self.rows))
            self._total = self.acceptance.prepare(self.rows)
            self.forward.table.send()
            self._state = self.forward.enter(len(self.rows))
        assert self._state is not None
        return self._state

    def _count(self, task: Task) -> None:
        entries = sum(row.prefix for row in self.rows) + len(self.rows) * self.session.block_length
        task.num_bytes += entries * self.session.entry_bytes()


def page_lock(address: int, num_bytes: int) -> int:
    """Page-lock mapped memory for copies of the GPU; the address, for unlocking."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
    if code:
        raise RunError(
            f"{num_bytes / 1e9:.1f} GB of host KV cannot be page-locked (CUDA error {code}); "
            "lower the batch or the context, or raise the limit of locked memory (ulimit -l)"
        )
    return address
