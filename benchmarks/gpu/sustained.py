"""A step again and again: whether a GPU under constant load keeps the pace of its first steps, and its clock and power.

Dense keeps a GPU busy without a pause, HERALD leaves it idle for most of a block where the host binds. A card at its
power limit lowers its clock, so that what was timed in bursts takes longer in a run. Three measurements tell: steps in
a burst after a rest, steps under constant load, and steps with as much rest between them as HERALD's have.
"""

import csv
import io
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import Cell

LOAD_S, REST_S, BUSY_SHARE = 4.0, 2.0, 0.3
"""Seconds under load, of rest before a burst; and the share of the time that steps with rests take."""
_BURST = 8
_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
_EVERY_MS = 100


def sustained(bench: Bench, cell: Cell, *, with_rests: bool = True) -> dict[str, Any]:
    """Milliseconds of a step in a burst, under load and with rests; the slow-down; clock and power meanwhile."""
    # Here, so that figures can be read without Triton.
    from benchmarks.gpu.steps import accepted_tokens, fill_lanes, half_accepted, open_step, roofline

    seconds = LOAD_S if bench.on_cuda else 0.2
    tokens = accepted_tokens(bench, cell.batch)
    session, actions = open_step(bench, cell)
    stream = torch.cuda.Stream() if bench.on_cuda else None
    with torch.inference_mode(), torch.cuda.stream(stream):
        lanes = fill_lanes(session, actions, cell.batch, cell.context, False)
        half_accepted(session, tokens, cell.context)
        actions.forward.capture(lanes)

        def step() -> None:
            normed = actions.forward(lanes)
            actions.acceptance.head(normed[: max(1, cell.batch * session.block_length // 2)])

        for _ in range(3):
            step()
        _wait(bench)
        time.sleep(REST_S if bench.on_cuda else 0)
        burst = [_timed_ms(bench, step) for _ in range(_BURST)]
        with _Watch(bench) as watch:
            load = _for(bench, step, seconds, 0.0)
        rest_s = (1 / BUSY_SHARE - 1) * median(burst) / 1e3
        rests = _for(bench, step, seconds, rest_s) if with_rests else []
    floor = roofline(bench, session, cell)
    session.pools.close()
    actions.close()
    where = {"batch": cell.batch, "context": cell.context}
    return summary(burst, load, rests) | where | {"roofline": floor, "device": watch.rows}


def summary(burst: list[float], load: list[float], rests: list[float]) -> dict[str, Any]:
    """Medians; under load those of ten equal parts of the time as well, for how fast it settles."""
    tenth = max(1, len(load) // 10)
    settled = load[len(load) // 2 :]
    found: dict[str, Any] = {
        "burst_ms": median(burst),
        "load_ms": median(settled),
        "load_ms_by_tenth": [median(load[i : i + tenth]) for i in range(0, len(load), tenth)],
        "slow_down": median(settled) / median(burst),
    }
    if rests:
        found |= {"rests_ms": median(rests), "slow_down_with_rests": median(rests) / median(burst)}
    return found


def _for(bench: Bench, work: Callable[[], None], seconds: float, rest_s: float) -> list[float]:
    found, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or not found:
        found.append(_timed_ms(bench, work))
        if rest_s:
            time.sleep(rest_s)
    return found


def _timed_ms(bench: Bench, work: Callable[[], None]) -> float:
    """One call by the host's clock: graphs begin at once, and every one of them lasts milliseconds."""
    begun = time.perf_counter()
    work()
    _wait(bench)
    return (time.perf_counter() - begun) * 1e3


def _wait(bench: Bench) -> None:
    if bench.on_cuda:
        torch.cuda.current_stream().synchronize()


class _Watch:
    """The driver's tool beside the work: a row every tenth of a second, none where the tool is missing."""

    def __init__(self, bench: Bench) -> None:
        self.rows: list[dict[str, str]] = []
        self._on = bench.on_cuda
        self._closing = ExitStack()

    def __enter__(self) -> "_Watch":
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
        self._process = None
        if self._on:
            try:
                self._process = self._closing.enter_context(
                    subprocess.Popen([*command, "-lms", str(_EVERY_MS)], stdout=subprocess.PIPE, text=True)
                )
            except OSError:
                self._on = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            text, _ = self._process.communicate()
            self.rows = rows_of(text)
        self._closing.close()


def rows_of(text: str) -> list[dict[str, str]]:
    """The tool's lines as it wrote them, cut-off ones left out."""
    lines = csv.reader(io.StringIO(text), skipinitialspace=True)
    return [dict(zip(_FIELDS, line, strict=True)) for line in lines if len(line) == len(_FIELDS)]
