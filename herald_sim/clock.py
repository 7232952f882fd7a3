"""Simulated time: simpy's environment with a clock of whole nanoseconds."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL

Calls = tuple[Callable[[Any], None], ...]
"""Callbacks of an event, shared by all of a kind."""


class Alarm(simpy.Event):
    """A timeout that cannot fail and whose callbacks are known from the start.

    There are two of them a launch, so what :class:`simpy.Timeout` sets on every instance is set as little as it can be.
    """

    _ok = True
    _value: Any

    def __init__(self, clock: "Clock", value: object, calls: Calls) -> None:
        self.env = clock
        self.callbacks = calls  # type: ignore[assignment] # simpy only walks through them
        self._value = value


class Clock(simpy.Environment):
    """An environment whose time starts at 0 and is an integer: every delay that it is given is one."""

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds since the run's start."""
        now: int = self._now  # type: ignore[assignment] # simpy's clock stays an int while all delays are
        return now

    def run(self, until: float | simpy.Event | None = None) -> Any:
        """As simpy's, which makes a call an event and looks whether it has failed; none of a clock's events can."""
        if until is not None:
            return super().run(until)
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment] # as simpy marks it processed
            for call in callbacks:
                call(event)
        return None

    def at(self, at_ns: int, value: object, calls: Calls) -> Alarm:
        """The event that makes ``calls`` at ``at_ns``, which must not be past; it holds ``value``."""
        alarm = Alarm(self, value, calls)
        # What schedule() does with a delay.
        heappush(self._queue, (at_ns, NORMAL, next(self._eid), alarm))
        return alarm

    def after(self, delay_ns: int, value: object, call: Callable[[Any], None]) -> simpy.Event:
        """The event that calls ``call`` in ``delay_ns`` (at once, when that is past); it holds ``value``."""
        timeout = simpy.Timeout(self, delay_ns if delay_ns > 0 else 0, value)
        timeout.callbacks.append(call)
        return timeout
