"""A forward of whole blocks, layer by layer: whose KV is read, where the block's own KV goes (DESIGN section 5)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from herald_exec.attention import Partial, attend_partial, merge
from herald_exec.pools import KV, KVStore
from herald_exec.requests import Row
from herald_exec.session import Session, Task
from herald_pipeline.pools import Buffer, Region
from herald_pipeline.stages import Mode


class Lanes:
    """Tokens on their way through the layers, in lanes of n: one lane a row, or two where a draft goes along.

    Attributes
    ----------
    positions
        Absolute positions ``[lanes, n]``.
    hidden
        What enters the next layer, ``[lanes * n, H]``.
    seen
        ``[lanes, n, n]`` bool, what a lane's tokens see of one another; ``None``: everything.
    """

    def __init__(self, session: Session, rows: Sequence[Row], ids: Tensor, positions: Tensor) -> None:
        self.session = session
        self.rows = list(rows)
        self.positions = positions
        self.rotary = session.model.rotary(positions.flatten())
        self.hidden = session.model.embed(ids.flatten())
        self.seen: Tensor | None = None

    def project(self, layer: int) -> tuple[Tensor, KV]:
        """Queries ``[lanes, n, heads, d]`` and own KV ``[lanes, kv, n, d]`` of a layer."""
        q, k, v = self.session.model.project(layer, self.hidden, self.rotary)
        lanes, tokens = self.positions.shape
        own = KV(*(part.reshape(lanes, tokens, *part.shape[1:]).transpose(1, 2) for part in (k, v)))
        return q.reshape(lanes, tokens, *q.shape[1:]), own

    def attend(self, layer: int, q: Tensor, own: KV, prefix: Partial) -> None:
        """Join the prefix part with the lane's own tokens and finish the layer."""
        self.finish(layer, merge(prefix, attend_partial(q, own.keys, own.values, mask=self.seen)))

    def finish(self, layer: int, attended: Tensor) -> None:
        """Output projection and feed-forward of ``attended [lanes, n, heads, d]``."""
        self.hidden = self.session.model.finish(layer, self.hidden, attended.flatten(0, 1))

    def keep_completed(self, task: Task, layer: int, own: KV) -> None:
        """Clean KV of the rows that complete their block, for methods whose steps leave nothing in a pool."""
        completing = [i for i, row in enumerate(self.rows) if row.mode.completes]
        if completing:
            rows = [self.rows[i] for i in completing]
            store_completed(self.session, task, layer, rows, _pick(own, completing), self.positions[completing])


class BlockForward(Lanes):
    """Forward of the blocks of ``rows``, with a second group of B tokens (the draft) for rows that carry one.

    Lanes: first the rows that draft, then the others, then the draft group of each row that drafts. A lane sees its
    row's prefix and itself; the two groups of a row do not see each other (paper section IV-B2).
    """

    def __init__(self, session: Session, rows: Sequence[Row]) -> None:
        ordered = sorted(rows, key=lambda row: (row.mode is not Mode.DRAFT, row.slot))
        self.num_drafting = sum(row.mode is Mode.DRAFT for row in rows)
        state, block = session.state, session.window
        masked = state.gather(ordered, state.masked)
        tokens = state.gather(ordered, state.tokens)
        # A literal mask id in a prompt is a token: only what is marked as masked gets the mask's embedding.
        ids = torch.where(masked, session.model.shape.mask_token_id, tokens)
        drafting = ordered[: self.num_drafting]
        if drafting:
            ids = torch.cat([ids, state.draft[[row.slot for row in drafting]]])
        starts = torch.tensor([row.prefix for row in (*ordered, *drafting)], device=ids.device)
        super().__init__(session, ordered, ids, starts[:, None] + torch.arange(block, device=ids.device))
        # A draft stands for the completed block: its KV sees what the completing forward's would.
        completing = [row.mode.completes for row in ordered] + [True] * len(drafting)
        self.seen = _lanes_sight(session, completing)

    @property
    def row_hidden(self) -> Tensor:
        """Hidden states of the rows' own groups, ``[R, B, H]``."""
        lanes = self.hidden.view(len(self.positions), self.session.window, -1)
        return lanes[: len(self.rows)]

    def run(self, task: Task, layer: int) -> None:
        """One layer over the pools: store the blocks' own KV, attend, finish."""
        q, own = self.project(layer)
        store_block(self.session, task, layer, self.rows, own, self.positions)
        self.attend(layer, q, own, self._prefix_parts(task, layer, q))

    def _prefix_parts(self, task: Task, layer: int, q: Tensor) -> Partial:
        """Attention of all lanes to their rows' prefixes; a row's two groups read it together, once."""
        drafting, count = self.num_drafting, len(self.rows)
        plain = q[drafting:count]
        parts = []
        if drafting:
            both = torch.cat([q[:drafting], q[count:]], dim=1)
            parts.append(attend_prefix(self.session, task, layer, self.rows[:drafting], both))
        if drafting < count:
            parts.append(attend_prefix(self.session, task, layer, self.rows[drafting:], plain))
        if not drafting:
            return parts[0]
        block = self.session.window
        own = [Partial(part.output[:, :block], part.log_sum_exp[:, :block]) for part in parts]
        draft = Partial(parts[0].output[:, block:], parts[0].log_sum_exp[:, block:])
        joined = [*own, draft]
        return Partial(torch.cat([part.output for part in joined]), torch.cat([part.log_sum_exp for part in joined]))


def _lanes_sight(session: Session, completing: Sequence[bool]) -> Tensor | None:
    """:meth:`Session.sight` of every lane, ``[lanes, W, W]``."""
    sights = [session.sight(completes) for completes in (False, True)]
    if sights == [None, None]:
        return None
    everything = torch.ones(session.window, session.window, dtype=torch.bool, device=session.device)
    step, clean = (everything if sight is None else sight for sight in sights)
    flags = torch.tensor(list(completing), device=session.device)
    return torch.where(flags[:, None, None], clean, step)


def source(session: Session, layer: int) -> KVStore:
    """The device pool that a step reads for this layer."""
    for name in ("full", "exact", "sparse"):
        store = session.pools.stores.get(name)
        if store is not None and store.holds(layer):
            return store
    raise AssertionError(f"no pool holds layer {layer}")


def prefix_length(store: KVStore, row: Row) -> int:
    """Entries before the block's own in a step's pool: S, or k and the tail."""
    return row.selected + row.tail if store.name == "sparse" else row.prefix


def storage_rows(session: Session, store: KVStore, rows: Sequence[Row]) -> list[int]:
    """Storage rows that steps of these blocks read."""
    double = store.name == "sparse" and session.double_buffered
    return [store.row(row.slot, row.parity if double else 0) for row in rows]


def attend_prefix(session: Session, task: Task, layer: int, rows: Sequence[Row], q: Tensor) -> Partial:
    """Attention of ``q [R, Lq, heads, d]`` to each row's prefix in the pool that serves ``layer``."""
    store = source(session, layer)
    at = storage_rows(session, store, rows)
    if store.name == "sparse":
        buffer = Buffer.ACTIVE if session.double_buffered else Buffer.ONE
        task.require(task.reads("sparse", Region.SELECTED, buffer), "reading the selected entries")
        for row, place in zip(rows, at, strict=True):
            tail = torch.arange(row.prefix - row.tail, row.prefix)
            store.check_range(layer, place, tail, row.selected, task.where)
    else:
        task.require(task.reads(store.name, Region.PREFIX), f"reading {store.name}")
        for row, place in zip(rows, at, strict=True):
            store.check_range(layer, place, torch.arange(row.prefix), 0, task.where)
    lengths = [prefix_length(store, row) for row in rows]
    return attend_ragged(q, store.view(layer, at, max(lengths)), lengths)


def attend_ragged(q: Tensor, kv: KV, lengths: Sequence[int]) -> Partial:
    """Partial attention over rows of different lengths; no mask when they are all alike."""
    alike = min(lengths) == max(lengths)
    mask = None if alike else torch.tensor(list(lengths), device=q.device)
    return attend_partial(q, kv.keys, kv.values, lengths=mask)


def store_block(session: Session, task: Task, layer: int, rows: Sequence[Row], own: KV, positions: Tensor) -> None:
    """Write the blocks' own KV behind their prefixes; completed and drafted blocks also to where they leave from.

    ``own`` has one lane a row, then the draft lanes of the rows that draft (which come first among ``rows``).
    """
    store, count = source(session, layer), len(rows)
    blocks = KV(own.keys[:count], own.values[:count])
    if store.name == "sparse":
        buffer = Buffer.ACTIVE if session.double_buffered else Buffer.ONE
        task.require(task.writes("sparse", Region.SCRATCH, buffer), "writing the block's own KV")
    else:
        task.require(task.writes(store.name, Region.BLOCK), f"writing the block to {store.name}")
    starts = [prefix_length(store, row) for row in rows]
    store.write(layer, storage_rows(session, store, rows), starts, blocks, positions[:count])
    completing = [i for i, row in enumerate(rows) if row.mode.completes]
    if completing and store.name != "full":
        store_completed(
            session, task, layer, [rows[i] for i in completing], _pick(own, completing), positions[completing]
        )
    drafting = [i + count if row.mode is Mode.DRAFT else i for i, row in enumerate(rows) if row.mode.drafts]
    if drafting:
        task.require(task.writes("draft_out"), "writing the draft's KV")
        drafted = [row for row in rows if row.mode.drafts]
        out = session.pools.stores["draft_out"]
        out.write(layer, [row.slot for row in drafted], [0] * len(drafted), _pick(own, drafting), positions[drafting])


def store_completed(
    session: Session, task: Task, layer: int, rows: Sequence[Row], clean: KV, positions: Tensor
) -> None:
    """A completed block's clean KV: the idle pool's tail, or the buffer from which it goes to the host.

    Of a window only the block itself, its leftmost positions.
    """
    block = session.block_length
    clean, positions = KV(clean.keys[:, :, :block], clean.values[:, :, :block]), positions[:, :block]
    if session.pools.partial is not None:
        task.require(task.writes("partial", Region.BLOCK), "writing partial keys")
        for i, row in enumerate(rows):
            session.pools.partial.write(layer, row.slot, row.prefix, clean.keys[i])
    if not session.double_buffered:
        task.require(task.writes("clean"), "writing clean KV")
        session.pools.stores["clean"].write(layer, [row.slot for row in rows], [0] * len(rows), clean, positions)
    elif session.pools.stores["sparse"].holds(layer):
        task.require(task.writes("sparse", Region.TAIL, Buffer.IDLE), "writing the idle pool's tail")
        store = session.pools.stores["sparse"]
        at = [store.row(row.slot, row.idle) for row in rows]
        store.write(layer, at, [row.to_select for row in rows], clean, positions)


def _pick(kv: KV, lanes: Sequence[int]) -> KV:
    index = list(lanes)
    return KV(kv.keys[index], kv.values[index])
