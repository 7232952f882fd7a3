"""Selected rows that the device reads from host memory by itself (``gather=gpu``): see :mod:`.kernels.rows`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from herald_exec.cuda.fetched import page_lock
from herald_exec.cuda.kernels.rows import fetch_rows
from herald_exec.cuda.proxy_pass import ProxyPass
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
    """Rows of the host's page-locked pages into the sparse pool or the ring; before that indices that the CPU found.

    ``proxies`` are steps that pick on the device: their indices are there already.

    Raises
    ------
    RunError
        The host's pages cannot be page-locked.
    """

    def __init__(self, session: Session, proxies: ProxyPass | None) -> None:
        full, slots = session.pools.hosts["full"].pages, session.pools.slots
        self._proxies = proxies
        cuda = session.device.type == "cuda"
        self._locked = 0
        if cuda:
            full.first_touch()  # spread over the nodes of the workers; pinning alone would put it all on one
            self._locked = page_lock(full.address, full.nbytes)
        most = session.pools.stores["sparse"].capacity if proxies is None else 0
        size = 3 * slots + slots * full.num_kv_heads * most
        self._told = torch.zeros(size, dtype=torch.int32, device=session.device)
        self._host = [torch.zeros(size, dtype=torch.int32, pin_memory=cuda) for _ in range(_AHEAD)]
        # One that was never recorded has passed.
        self._sent: list[Any] = [torch.cuda.Event(blocking=True) if cuda else None for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]

    def fetch(self, session: Session, task: Task) -> None:
        """A layer's selected entries of every row, from host memory to where the stage declares them."""
        pools, idle = session.pools, session.double_buffered
        known = task.reads("indices") or task.reads("picked") or task.reads("indices", buffer=Buffer.RING)
        task.require(known and task.reads("full", Region.PREFIX), "reading the selected entries")
        to_ring = task.writes("fetched", buffer=Buffer.RING)
        declared = task.writes("sparse", Region.SELECTED, Buffer.IDLE if idle else Buffer.ONE)
        task.require(to_ring or declared, "writing the selected entries")
        full, target = pools.hosts["full"].pages, pools.stores["fetched" if to_ring else "sparse"]
        told, indices = self._tell(session, task) if self._proxies is None else self._proxies.picked(task)
        layer_bytes, *strides = full.pages.strides[:3]
        fetch_rows(full.address + task.layer * layer_bytes, told, indices, target.layer(task.layer), *strides)
        task.num_bytes += sum(row.to_select for row in task.rows) * session.entry_bytes()

    def _tell(self, session: Session, task: Task) -> tuple[Tensor, Tensor]:
        """What the CPU found, on the device: slots, storage rows and counts ``[3, R]``; positions ``[R, kv, k]``."""
        rows, sparse = task.rows, session.pools.stores["sparse"]
        found = session.pools.indices[task.layer, rows[0].slot]
        counts = [row.to_select for row in rows]
        if (found.counts != np.array(counts)[:, None]).any():
            raise RunError(f"{task.where}: a KV head's selection is shorter than its row's budget")
        turn, event = task.turn % _AHEAD, self._sent[task.turn % _AHEAD]
        if event is not None:
            event.synchronize()
        host = self._host[turn].numpy()
        at = [sparse.row(row.slot, row.idle if session.double_buffered else 0) for row in rows]
        host[: 3 * len(rows)] = np.array([[row.slot for row in rows], at, counts], np.int32).ravel()
        size = 3 * len(rows) + found.indices.size
        host[3 * len(rows) : size] = found.indices.ravel()
        self._told[:size].copy_(self._host[turn][:size], non_blocking=True)
        if event is not None:
            event.record()
        return self._told[: 3 * len(rows)].view(3, -1), self._told[3 * len(rows) : size].view(found.indices.shape)

    def close(self) -> None:
        """Unlock the pages, before they are unmapped; safe to call twice."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
        self._locked = 0
