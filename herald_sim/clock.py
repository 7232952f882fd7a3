"""Simulated time: simpy's environment with a clock of whole nanoseconds."""

from collections.abc import Callable
from typing import Any

import simpy


class Clock(simpy.Environment):
    """An environment whose time starts at 0 and is an integer: every delay that it is given is one."""

    @property
    def now_ns(self) -> int:
        """The time in nanoseconds since the run's start."""
        now: int = self._now  # type: ignore[assignment] # simpy's clock stays an int while all delays are
        return now

    def after(self, delay_ns: int, value: object, call: Callable[[Any], None]) -> simpy.Event:
        """The event that calls ``call`` in ``delay_ns`` (at once, when that is past); it holds ``value``."""
        timeout = simpy.Timeout(self, delay_ns if delay_ns > 0 else 0, value)
        timeout.callbacks.append(call)
        return timeout
