"""Simulated time: simpy's environment with a clock of whole nanoseconds."""

from collections.abc import Callable
from typing import Any

import simpy


class Clock(simpy.Environment):
    """An environment whose time starts at 0 and is an integer: every delay that it is given is one."""

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds since the run's start."""
        now = self._now
        assert isinstance(now, int)
        return now

    def after(self, delay_ns: int, value: object, call: Callable[[Any], None]) -> None:
        """Call ``call`` with an event that holds ``value``, ``delay_ns`` from now (at once, when that is past)."""
        timeout = self.timeout(delay_ns if delay_ns > 0 else 0, value)
        assert timeout.callbacks is not None
        timeout.callbacks.append(call)
