"""What a forward must know of its lanes, as numbers on the device.

A graph is captured once for a number of lanes and replayed with other rows, lengths, buffers and modes: everything that
changes from launch to launch is read from one int32 table, filled on the host and copied before the replay.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from herald_exec.requests import Row
from herald_exec.session import Session
from herald_pipeline.stages import Mode

_AHEAD = 4
"""Launches that the host may be ahead of the device."""
NOWHERE = -1
"""Storage row of a lane that stores nothing in a pool."""


class Field(IntEnum):
    """Rows of the table. ``FULL_*`` serve layers whose full KV is on the device, ``SPARSE_*`` the others."""

    SLOT = 0
    START = 1
    IS_DRAFT = 2
    FULL_ROW = 3
    FULL_LENGTH = 4
    FULL_STORE_ROW = 5
    FULL_STORE_AT = 6
    SPARSE_ROW = 7
    SPARSE_LENGTH = 8
    SPARSE_STORE_ROW = 9
    SPARSE_STORE_AT = 10
    OUT_ROW = 11
    IS_OPEN = 12
    ACCEPTS = 13
    STEP = 14
    IS_FIRST = 15
    REQUEST = 16
    TO_SELECT = 17


_NOTHING = (Field.FULL_STORE_ROW, Field.SPARSE_STORE_ROW, Field.OUT_ROW)


class LaneTable:
    """Pinned and device copies of the table, for at most ``lanes`` lanes.

    Pinned copies take turns: the host may prepare as many launches ahead of the device, and sleeps before it goes
    further.
    """

    def __init__(self, lanes: int, device: torch.device) -> None:
        dims = (len(Field), lanes)
        self.device_table = torch.zeros(dims, dtype=torch.int32, device=device)
        self.device_table[list(_NOTHING)] = NOWHERE
        cuda = device.type == "cuda"
        self._host = [torch.zeros(dims, dtype=torch.int32, pin_memory=cuda) for _ in range(_AHEAD)]
        # One that was never recorded has passed.
        self._sent = [torch.cuda.Event(blocking=True) if cuda else None for _ in range(_AHEAD)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def __getitem__(self, field: Field) -> Tensor:
        """A field of all lanes on the device."""
        return self.device_table[field]

    def fill(self, session: Session, rows: Sequence[Row], lanes: int) -> None:
        """Describe ``rows``, then the draft lanes of those that draft, then lanes that do nothing up to ``lanes``."""
        drafting = [row for row in rows if row.mode is Mode.DRAFT]
        columns = [_lane(session, row, draft=False) for row in rows] + [
            _lane(session, row, draft=True) for row in drafting
        ]
        columns += [_EMPTY] * (lanes - len(columns))
        self._turn = (self._turn + 1) % _AHEAD
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        # numpy takes lists of numbers several times faster than torch.
        self._host[self._turn].numpy()[:, :lanes] = np.array(columns, np.int32).T

    def set(self, field: Field, values: Sequence[int]) -> None:
        """Set a field of the first lanes; after :meth:`fill`."""
        self._host[self._turn].numpy()[field, : len(values)] = values

    def send(self) -> None:
        """Copy the table to the device, behind earlier work of the current stream."""
        self.device_table.copy_(self._host[self._turn], non_blocking=True)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.record()


_EMPTY = tuple(NOWHERE if field in _NOTHING else 0 for field in Field)


def _lane(session: Session, row: Row, *, draft: bool) -> tuple[int, ...]:
    """A lane's fields, in their order; those of decoding are set apart."""
    completes = row.mode.completes and not draft
    full_store = (row.slot, row.prefix) if completes else (NOWHERE, 0)
    sparse, sparse_store, out_row = (0, 0), (NOWHERE, 0), NOWHERE
    store, double = session.pools.stores.get("sparse"), session.double_buffered
    if store is not None:
        sparse = (store.row(row.slot, row.parity if double else 0), row.selected + row.tail)
        if completes and double:
            sparse_store = (store.row(row.slot, row.idle), row.to_select)
        elif completes:
            out_row = row.slot
    elif completes and "clean" in session.pools.stores:
        out_row = row.slot
    if draft or row.mode is Mode.COMPLETE_DRAFT:
        out_row = row.slot
    decoding = (0, 0, 0, 0, row.request.id, row.to_select)
    own = (row.slot, row.prefix, int(draft), row.slot, row.prefix)
    return (*own, *full_store, *sparse, *sparse_store, out_row, *decoding)


def bucket(lanes: int) -> int:
    """Lanes for which a graph is captured: the number itself up to 4, then multiples of 4, then of 8 above 32."""
    step = 1 if lanes <= 4 else 4 if lanes <= 32 else 8
    return -(-lanes // step) * step
