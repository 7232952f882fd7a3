"""Running the parts of a measurement one by one: what each found is kept at once, what failed is told as text."""

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from calibration import host_pool, parts
from calibration.bench import Bench, Part
from calibration.reference import reference_part, reference_seconds
from herald_pipeline.errors import HeraldError

Say = Callable[[str], None]


def run_parts(
    bench: Bench, names: Sequence[str], references: list[float], say: Say, keep: Callable[[], None], raw: Path
) -> tuple[list[str], bool]:
    """Fill ``bench.done``; returns a text for each part that found nothing, and whether the device was lost meanwhile.

    One part that fails costs no other, unless it takes the device with it: then nothing else can run in this process.
    """
    try:
        return _run_parts(bench, names, references, say, keep, raw)
    finally:
        host_pool.close(bench)


def _run_parts(
    bench: Bench, names: Sequence[str], references: list[float], say: Say, keep: Callable[[], None], raw: Path
) -> tuple[list[str], bool]:
    refused: list[str] = []
    wanted = [known for known in parts.NAMES if known in names]
    for position, name in enumerate(wanted):
        if not host_pool.PARTS.intersection(wanted[position:]):
            host_pool.close(bench)  # runs of later parts have its memory
        start = time.perf_counter()
        try:
            references.append(reference_seconds(bench.device, bench.main_cores, steady=True))
            part = parts.get(name)(bench)
            _settle(bench)
        except HeraldError as problem:
            refused.append(f"{name}: {problem}")
            say(f"  {name:<14} refused")
            continue
        except Exception as problem:
            # A defect, or a device that ran out of memory: kept whole, and the machine's time is not lost.
            refused.append(f"{name}: {_first_line(problem)} (trace: {_write_trace(raw, name)})")
            say(f"  {name:<14} failed")
            if _lost(bench):
                rest = ", ".join(wanted[position + 1 :]) or "none"
                refused.append(f"the device answers this process no more; not begun: {rest}")
                return refused, True
            continue
        for value in part.values:
            # Of a curve the highest value: what a rate's curve is a ceiling of.
            bench.found[value.path] = float(value.y if isinstance(value.y, float | int) else max(value.y))
        bench.done.append(part)
        keep()
        say(f"  {name:<14} {time.perf_counter() - start:5.1f} s   {_found(part)}")
    if references:
        # Its time, taken again beside every run, tells how much the machine has slowed down or sped up since.
        bench.done.append(reference_part(references))
        keep()
    return refused, False


def _settle(bench: Bench) -> None:
    """Wait for the device: what a part's work did wrong is told of that part and not of the next."""
    if bench.on_cuda:
        torch.cuda.synchronize(bench.device)


def _lost(bench: Bench) -> bool:
    """Whether the device refuses all that this process asks, as it does after an illegal access."""
    try:
        _settle(bench)
    except RuntimeError:
        return True
    return False


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"


def _write_trace(raw: Path, name: str) -> Path:
    """Write the trace of the exception being handled to the raw folder."""
    file = raw / f"{name}.failure.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(traceback.format_exc(), encoding="utf-8")
    return file


def _found(part: Part) -> str:
    shown = [
        f"{value.path.rpartition('.')[2]} {value.y:.4g}" if isinstance(value.y, float | int) else
        f"{value.path.rpartition('.')[2]} {min(value.y):.3g}..{max(value.y):.3g}"
        for value in part.values
    ]  # fmt: skip
    return ", ".join(shown)
