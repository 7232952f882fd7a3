"""The GPU where programs of its own fetch rows of host memory and keep multiprocessors from kernels meanwhile."""

from typing import Any

from herald_sim.clock import Alarm, Clock
from herald_sim.phases import KERNELS, Flow, Uses
from herald_sim.resources import Done, Gpu, Rates, StartFlow, Work

KERNELS_RUN: Uses = ((KERNELS, 0.0),)
"""What kernels are among flows: they take no rate, and some flows are slower beside them."""


class GpuBesideFetches(Gpu):
    """A GPU whose kernels take longer while it fetches rows of host memory: that holds some of its multiprocessors.

    A launch goes on at 1 / :attr:`~herald_sim.phases.Kernels.beside_fetch` of its speed for exactly the time in which a
    fetch is under way: what is left of it is priced anew when one begins and when the last one ends. A fetch that comes
    sooner by some time costs the launch less than that, so nothing that gets shorter makes an end later.
    """

    def __init__(self, env: Clock, done: Done) -> None:
        super().__init__(env, done)
        self._fetches: set[Work] = set()
        self._rates: Rates | None = None
        self._told_busy = False

    def beside(self, rates: Rates) -> StartFlow:
        """``rates.start`` that tells this GPU of flows that hold multiprocessors; ``rates`` hear of kernels."""
        self._rates = rates

        def started(work: Any, flow: Flow, now: int) -> None:
            if flow.holds_gpu:
                self._run_until(now)
                self._fetches.add(work)
                self._plan(now)
            rates.start(work, flow, now)

        return started

    def flow_ended(self, work: Work, now: int) -> None:
        """Told of every flow's end; of those that held nothing, too."""
        if work in self._fetches:
            self._run_until(now)
            self._fetches.discard(work)
            self._plan(now)

    def _run_until(self, now: int) -> None:
        if not self._fetches:
            super()._run_until(now)
            return
        passed, small, large = now - self._since, self._small, self._large
        self._since = now
        if small is not None and large is not None:
            own = passed / (small.kernels.beside_fetch + self._ratio * large.kernels.beside_fetch)
            small.remaining -= own
            large.remaining -= own * self._ratio
        else:
            for alone in (small, large):
                if alone is not None:
                    alone.remaining -= passed / alone.kernels.beside_fetch

    def _plan(self, now: int) -> None:
        busy = self._small is not None or self._large is not None
        if busy != self._told_busy and self._rates is not None:
            self._told_busy = busy
            self._rates.mark(KERNELS_RUN, busy, now)
        if not self._fetches:
            super()._plan(now)
            return
        small, large = self._small, self._large
        if small is None or large is None:
            for alone in (small, large):
                if alone is not None:
                    self._arm(alone, now + alone.remaining * alone.kernels.beside_fetch)
            return
        kernel_ns = small.kernels.kernel_ns
        ratio = self._ratio = large.kernels.wait_ns / kernel_ns if kernel_ns else 0.0
        one, other = small.kernels.beside_fetch, large.kernels.beside_fetch
        both = now + small.remaining * one + large.remaining * other
        if small.remaining * ratio <= large.remaining:
            self._arm(small, now + small.remaining * (one + ratio * other))
            self._arm(large, both)
        else:
            self._arm(large, now + large.remaining * (other + one / ratio))
            self._arm(small, both)

    def _arm(self, work: Work, end: float) -> None:
        """Let ``work`` end at ``end``, sooner than was planned too: an earlier timer is kept, a later one is void."""
        end_ns = work.end_ns = max(round(end), self._since)
        if work.armed_ns is None or work.armed_ns > end_ns:
            work.armed_ns = end_ns
            work.timer = self._at(end_ns, work, self._calls)

    def _fire(self, alarm: Alarm) -> None:
        work: Work = alarm._value
        if alarm is not work.timer:
            return
        work.timer = None  # it holds the work: the two would keep each other alive
        if work.armed_ns is not None and work.end_ns > work.armed_ns:
            work.armed_ns = None
            self._arm(work, work.end_ns)
            return
        super()._fire(alarm)
