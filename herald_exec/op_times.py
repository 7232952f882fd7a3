"""Where the time inside a stage goes: torch operations by stage, with torch's own profiler (``--profile-ops``).

A launch is marked in its stream's thread, every operation counts for the innermost mark around it, and what no torch
operation accounts for is the stage's own: kernels of :mod:`herald_exec.kernels`, Python, waiting for the interpreter.
The profiler itself takes time and keeps every event, so such a run is short, and its throughput is not a measurement.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from herald_exec.session import Action, Session, Task

_MARK = "herald stage: "
OUTSIDE = "outside torch"
"""Row of what no torch operation accounts for."""
_US_PER_S = 1e6


class OpTime(NamedTuple):
    """One operation within one stage kind: calls, its own seconds on the host, its own seconds on the device."""

    stage: str
    op: str
    calls: int
    host_s: float
    device_s: float


class OpTimes:
    """Collects operations by stage while a run is recorded."""

    def __init__(self) -> None:
        self.rows: list[OpTime] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Profile all threads meanwhile; :attr:`rows` are there afterwards."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # Streams are threads; by default only the thread that starts the profiler is seen.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=activities, experimental_config=every_thread) as found:
            yield
        self.rows = by_stage(found.events())

    def marked(self, actions: Mapping[str, Action]) -> dict[str, Action]:
        """Actions that leave a mark of their stage around all that they do."""
        return {name: _marked(action) for name, action in actions.items()}

    def table(self, per_stage: int = 8) -> str:
        """The longest operations of each stage, for people."""
        return text(self.rows, per_stage)


def _marked(action: Action) -> Action:
    def run(session: Session, task: Task) -> object:
        with record_function(_MARK + task.stage.name):
            return action(session, task)

    return run


def by_stage(events: Iterable[Any]) -> list[OpTime]:
    """Events of the profiler as sums by stage and operation, the longest first within each stage."""
    sums: dict[tuple[str, str], list[float]] = {}
    for event in events:
        stage = _stage(event)
        if stage is None:
            continue
        own = event.name.startswith(_MARK)
        found = sums.setdefault((stage, OUTSIDE if own else event.name), [0, 0.0, 0.0])
        found[0] += 1
        found[1] += event.self_cpu_time_total / _US_PER_S
        found[2] += getattr(event, "self_device_time_total", 0.0) / _US_PER_S
    rows = [OpTime(stage, op, int(calls), host, device) for (stage, op), (calls, host, device) in sums.items()]
    return sorted(rows, key=lambda row: (row.stage, -row.host_s - row.device_s))


def _stage(event: Any) -> str | None:
    """Stage of the innermost mark around an event, its own included."""
    while event is not None:
        if event.name.startswith(_MARK):
            return str(event.name).removeprefix(_MARK)
        event = event.cpu_parent
    return None


def text(rows: Iterable[OpTime], per_stage: int) -> str:
    """Columns: stage, operation, calls, own time, share of the stage; device time where there is any."""
    by: dict[str, list[OpTime]] = {}
    for row in rows:
        by.setdefault(row.stage, []).append(row)
    totals = {stage: sum(row.host_s for row in own) for stage, own in by.items()}
    on_device = any(row.device_s for own in by.values() for row in own)
    header = f"{'stage':<14}{'operation':<40}{'calls':>8}{'host ms':>11}{'share':>8}"
    lines = [header + (f"{'device ms':>12}" if on_device else "")]
    for stage in sorted(by, key=lambda name: -totals[name]):
        shown, rest = by[stage][:per_stage], by[stage][per_stage:]
        if rest:
            sums = [
                sum(column) for column in zip(*((row.calls, row.host_s, row.device_s) for row in rest), strict=True)
            ]
            shown = [*shown, OpTime(stage, f"{len(rest)} others", int(sums[0]), sums[1], sums[2])]
        for row in shown:
            share = row.host_s / totals[stage] if totals[stage] else 0.0
            line = f"{row.stage:<14}{row.op[:38]:<40}{row.calls:>8}{row.host_s * 1e3:>11.3f}{share:>8.1%}"
            lines.append(line + (f"{row.device_s * 1e3:>12.3f}" if on_device else ""))
    return "\n".join(lines)
