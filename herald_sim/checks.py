"""Invariants of a simulated run, for ``--check`` and tests; each says what it found when it does not hold."""

from herald_pipeline.errors import RunError
from herald_pipeline.hardware import Profile, known
from herald_pipeline.scheduling.admission import Admission
from herald_pipeline.scheduling.launches import Launch
from herald_sim.phases import Cost

_ROUNDING = 1e-6


class Ledger:
    """Sums over launches as they end: time, bytes over the links and in memory, work.

    Checks that the clock never goes back, that no launch is faster than alone, that bytes over a link in its busy time
    stay within its rate, and that requests in = finished + rejected + running + waiting.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._clock_ns = 0
        self._busy: dict[str, list[tuple[int, int]]] = {"h2d": [], "d2h": [], "dram": []}
        self.bytes = {"h2d": 0.0, "d2h": 0.0, "dram": 0.0}
        self.work_ns = 0
        self.launches = 0

    def finished(self, launch: Launch, cost: Cost, start_ns: int, end_ns: int) -> None:
        """A launch has run."""
        name = f"{launch.stage.name} of block {launch.block}"
        if end_ns < self._clock_ns or start_ns > end_ns:
            message = f"the clock went back: {name} ran [{start_ns}, {end_ns}) ns, the clock stood at {self._clock_ns}"
            raise RunError(message)
        self._clock_ns = end_ns
        alone = cost.total_ns
        if end_ns - start_ns < alone - len(cost.phases) - _ROUNDING * alone:
            message = f"work was lost: {name} took {end_ns - start_ns} ns, its work alone takes {alone} ns"
            raise RunError(message)
        self.work_ns += alone
        self.launches += 1
        for resource, num_bytes in (("h2d", cost.h2d_bytes), ("d2h", cost.d2h_bytes), ("dram", cost.dram_bytes)):
            if num_bytes:
                self.bytes[resource] += num_bytes
                _merge(self._busy[resource], start_ns, end_ns)

    def close(self, admission: Admission) -> None:
        """Check what holds at the end of a run."""
        machine = self._profile.machine
        rates = {"h2d": machine.link.h2d_gb_s, "d2h": machine.link.d2h_gb_s, "dram": machine.dram.read_gb_s}
        for resource, intervals in self._busy.items():
            busy = sum(end - start for start, end in intervals)
            rate = known(rates[resource]).peak if self.bytes[resource] and rates[resource] is not None else 0.0
            if rate and self.bytes[resource] > rate * (busy + len(intervals)) * (1 + _ROUNDING):
                message = (
                    f"{self.bytes[resource]:.0f} bytes over {resource} in {busy} ns exceed its rate of {rate} GB/s"
                )
                raise RunError(message)
        counted = len(admission.finished) + len(admission.rejected) + len(admission.running) + admission.waiting
        if admission.submitted != counted:
            message = (
                f"requests in ({admission.submitted}) != finished ({len(admission.finished)}) + rejected "
                f"({len(admission.rejected)}) + running ({len(admission.running)}) + waiting ({admission.waiting})"
            )
            raise RunError(message)


def _merge(intervals: list[tuple[int, int]], start: int, end: int) -> None:
    """Add [start, end) to disjoint intervals whose newest ends are last; intervals that touch become one."""
    while intervals and intervals[-1][1] >= start:
        earlier, later = intervals.pop()
        start, end = min(start, earlier), max(end, later)
    intervals.append((start, end))
