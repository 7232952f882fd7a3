"""Selected rows that the device reads from host memory by itself (``gather=gpu``): see :mod:`.kernels.rows`."""

from typing import Any

import numpy as np
import torch

from herald_exec.cuda.fetched import page_lock
from herald_exec.cuda.kernels.rows import fetch_rows
from herald_exec.session import Session, Task
from herald_pipeline.errors import RunError
from herald_pipeline.pools import Buffer, Region

_AHEAD = 2
"""Launches whose indices are on their way at once."""


def reads_rows(session: Session) -> bool:
    """Whether the device reads selected rows of the host's pages, in the format in which they lie there."""
    full = session.pools.hosts.get("full")
    fetches = any(stage.action == "fetch_rows" for stage in session.pipeline.template.stages())
    return fetches and full is not None and full.dtype is session.model.kv_dtype


class RowFetch:
    """Indices down to the device, then rows of the host's page-locked pages into the sparse pool.

    Raises
    ------
    RunError
        The host's pages cannot be page-locked.
    """

    def __init__(self, session: Session) -> None:
        full, sparse, slots = session.pools.hosts["full"].pages, session.pools.stores["sparse"], session.pools.slots
        cuda = session.device.type == "cuda"
        self._locked = 0
        if cuda:
            full.first_touch()  # spread over the nodes of the workers; pinning alone would put it all on one
            self._locked = page_lock(full.address, full.nbytes)
        size = 3 * slots + slots * full.num_kv_heads * sparse.capacity
        self._told = torch.zeros(size, dtype=torch.int32, device=session.device)
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(_AHEAD)]
        # One that was never recorded has passed.
        self._sent: list[Any] = [torch.cuda.Event(blocking=True) if cuda else None for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]

    def fetch(self, session: Session, task: Task) -> None:
        """A layer's selected entries of every row, from host memory into the selected region of the sparse pool."""
        pools, rows, idle = session.pools, task.rows, session.double_buffered
        known = task.reads("indices") or task.reads("picked")
        task.require(known and task.reads("full", Region.PREFIX), "reading the selected entries")
        declared = task.writes("sparse", Region.SELECTED, Buffer.IDLE if idle else Buffer.ONE)
        task.require(declared, "writing the selected entries")
        sparse, full, found = pools.stores["sparse"], pools.hosts["full"].pages, pools.indices[task.layer, rows[0].slot]
        counts = [row.to_select for row in rows]
        if (found.counts != np.array(counts)[:, None]).any():
            raise RunError(f"{task.where}: a KV head's selection is shorter than its row's budget")
        turn, event = task.turn % _AHEAD, self._sent[task.turn % _AHEAD]
        if event is not None:
            event.synchronize()
        told = self._host[turn].numpy()
        at = [sparse.row(row.slot, row.idle if idle else 0) for row in rows]
        told[: 3 * len(rows)] = np.array([[row.slot for row in rows], at, counts], np.int32).ravel()
        size = 3 * len(rows) + found.indices.size
        told[3 * len(rows) : size] = found.indices.ravel()
        self._told[:size].copy_(self._host[turn][:size], non_blocking=True)
        if event is not None:
            event.record()
        layer_bytes, *strides = full.pages.strides[:3]
        fetch_rows(
            full.address + task.layer * layer_bytes,
            self._told[: 3 * len(rows)].view(3, -1),
            self._told[3 * len(rows) : size].view(found.indices.shape),
            sparse.layer(task.layer),
            *strides,
        )
        task.num_bytes += sum(counts) * session.entry_bytes()

    def close(self) -> None:
        """Unlock the pages, before they are unmapped; safe to call twice."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
        self._locked = 0
