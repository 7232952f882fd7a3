"""Admission: requests into slots, within the KV room; what can never fit is rejected once."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from herald_pipeline.scheduling.lengths import check_length, padded_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """One request: ``context`` completed prompt tokens, then ``blocks`` blocks of answer.

    ``context`` counts whole blocks only; a prompt's tail shares its block with masks (the executor's business).
    ``continues``: the answer goes on after the last block, so that one retrieves for a next block too. Speed runs
    measure this steady state. ``prompt_tokens`` and ``new_tokens``: what was asked for, before blocks were rounded;
    without them context and blocks are what was asked for.
    """

    id: int
    context: int
    blocks: int
    arrival_ns: int = 0
    continues: bool = False
    prompt_tokens: int | None = None
    new_tokens: int | None = None

    def padded_tokens(self, block_length: int) -> int:
        """Highest position it can write, plus one."""
        return padded_tokens(*self._asked(block_length), block_length)

    def length_problem(self, block_length: int, limit: int) -> str | None:
        """Why it does not fit ``limit`` positions, or ``None``."""
        return check_length(*self._asked(block_length), block_length, limit, f"request {self.id}")

    def _asked(self, block_length: int) -> tuple[int, int]:
        """Prompt and answer in tokens."""
        if self.prompt_tokens is None or self.new_tokens is None:
            return self.context, self.blocks * block_length
        return self.prompt_tokens, self.new_tokens


class Admission:
    """First come, first served into ``slots`` slots and ``kv_tokens`` of KV room (``None``: no limit).

    Requests in = finished + rejected + running + waiting, always.

    Attributes
    ----------
    fullest
        Padded tokens of the requests that ran together when most did: the moments that no other one beat both in
        tokens and in number. What a run takes of memory at its peak is that of one of them.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        slots: int,
        block_length: int,
        kv_tokens: int | None = None,
    ) -> None:
        self._waiting = deque(sorted(requests, key=lambda request: (request.arrival_ns, request.id)))
        self._block_length = block_length
        self._kv_tokens = kv_tokens
        self._free_slots = list(range(slots - 1, -1, -1))
        self._used_tokens = 0
        self.submitted = len(self._waiting)
        self.finished: list[int] = []
        self.rejected: dict[int, str] = {}
        self.running: dict[int, Request] = {}
        self.fullest: list[tuple[int, ...]] = []

    @property
    def next_arrival_ns(self) -> int | None:
        """When the first waiting request arrives."""
        return self._waiting[0].arrival_ns if self._waiting else None

    @property
    def waiting(self) -> int:
        """Requests neither admitted nor rejected yet."""
        return len(self._waiting)

    def admit(self, now_ns: int) -> list[int]:
        """Move arrived requests into free slots, in order; returns the slots filled."""
        filled = []
        while self._waiting and self._waiting[0].arrival_ns <= now_ns:
            request = self._waiting[0]
            limit = self._kv_tokens
            problem = None if limit is None else request.length_problem(self._block_length, limit)
            if problem is not None:
                self._waiting.popleft()
                self.rejected[request.id] = problem
                continue
            tokens = request.padded_tokens(self._block_length)
            full = limit is not None and self._used_tokens + tokens > limit
            if full or not self._free_slots:
                break
            self._waiting.popleft()
            slot = self._free_slots.pop()
            self._used_tokens += tokens
            self.running[slot] = request
            filled.append(slot)
        if filled:
            self._note_fullest()
        return filled

    def _note_fullest(self) -> None:
        sizes = tuple(request.padded_tokens(self._block_length) for request in self.running.values())
        tokens, count = sum(sizes), len(sizes)
        if any(sum(other) >= tokens and len(other) >= count for other in self.fullest):
            return
        self.fullest = [other for other in self.fullest if sum(other) > tokens or len(other) > count] + [sizes]

    def finish(self, slot: int) -> None:
        """The slot's request is done; its slot and room are free."""
        request = self.running.pop(slot)
        self._used_tokens -= request.padded_tokens(self._block_length)
        self._free_slots.append(slot)
        self.finished.append(request.id)
