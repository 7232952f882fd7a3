"""Grids of configurations: every combination once, resumable, on local processes or an existing dask cluster.

A grid is a TOML file::

    [base]                                  # options of `herald-sim run`, without the dashes
    model = "llada2-mini"
    hardware = "h100-sxm-80g_xeon-8481c"
    context = 32768

    [grid]                                  # every combination of these
    method = ["dense", "herald"]
    batch = [16, 80]
    "machine.link.h2d_gb_s" = [20.0, 27.0]  # dotted: as in --set

Lists in options, ``--method dense,herald --context 32768 --batch 16,80``, say the same without a file.

The folder gets ``points.jsonl`` (one line a point, appended as points end) and ``summary.json`` (best point, Pareto
front of throughput against block time, counts, reasons). A point that does not fit is ``infeasible`` with the limit and
never wins; one whose worker died or that was refused is ``failed`` with the reason.
"""

import hashlib
import json
import math
import multiprocessing
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from herald_pipeline.errors import CapacityError, ConfigError, HeraldError, did_you_mean, read_failure
from herald_sim.held_points import PATHS, POINTS, basis, read_points
from herald_sim.options import Options

SUMMARY = "summary.json"
_RESULT_KEYS = (
    "throughput_tok_s",
    "block_time_s",
    "main_time_s",
    "retrieval_time_s",
    "stall_s",
    "status",
    "limit",
    "hbm_bytes",
    "dram_bytes",
    "kv_bytes_per_request",
    "beyond_max_positions",
    "mode",
    "contention_error",
)
_IN_FLIGHT_PER_WORKER = 2

Point = dict[str, Any]


def read_grid(path: Path) -> list[Point]:
    """Points of a grid file, in the order of its keys; every problem in one error."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        message = f"{path} is not a readable TOML grid: {read_failure(problem)}"
        raise ConfigError(message) from None
    problems = [
        f"{path}: unknown table {name!r}{did_you_mean(name, ('base', 'grid'))}"
        for name in data
        if name not in ("base", "grid")
    ]
    base, grid = data.get("base", {}), data.get("grid", {})
    if not isinstance(base, dict) or not isinstance(grid, dict):
        message = f"{path}: 'base' and 'grid' must be tables: write [base] and [grid] above their options"
        raise ConfigError(message)
    known = {field.name for field in fields(Options)} - {"sets"}
    for table, values in (("base", base), ("grid", grid)):
        problems += [
            f"{path}: [{table}] {name!r} is no option{did_you_mean(name, known)}"
            for name in values
            if "." not in name and name not in known
        ]
    problems += [
        f"{path}: [grid] {name} must be a list of values, got {value!r}"
        for name, value in grid.items()
        if not isinstance(value, list) or not value
    ]
    problems += [f"{path}: {name!r} stands in [base] and in [grid]" for name in grid if name in base]
    problems += [
        f"{path}: {name} is missing"
        for name in ("model", "method", "hardware")
        if name not in base and name not in grid
    ]
    problems += [
        f"{path}: {name} must be finite, got {value!r}"
        for name, values in (*base.items(), *grid.items())
        for value in (values if isinstance(values, list) else [values])
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if problems:
        raise ConfigError(problems)
    return [{**base, **dict(zip(grid, values, strict=True))} for values in product(*grid.values())]


_AXES: Mapping[str, type] = {
    "model": str,
    "method": str,
    "hardware": str,
    "context": int,
    "batch": int,
    "budget": float,
}
"""Options that `herald-sim sweep` takes lists of, and the type of their values."""


def points_of(lists: Mapping[str, str | None]) -> list[Point]:
    """Points of options that hold lists with commas, in the order of the options; every problem in one error."""
    problems = [f"--{name} is missing" for name in ("model", "method", "hardware") if not lists.get(name)]
    axes: dict[str, list[Any]] = {}
    for name, text in lists.items():
        kind = _AXES[name]
        for value in text.split(",") if text is not None else ():
            try:
                axes.setdefault(name, []).append(_parsed(kind, value.strip()))
            except ValueError:
                if kind is str:
                    problems.append(f"--{name} holds an empty name: {text!r}")
                    continue
                wanted = "whole numbers" if kind is int else "numbers"
                problems.append(f"--{name} must be {wanted} with commas between them, got {value.strip()!r}")
    if problems:
        raise ConfigError(problems)
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _parsed(kind: type, text: str) -> Any:
    """The value that ``text`` writes; ValueError for an empty name and for what no result could be written of."""
    value = kind(text)
    if not text or (kind is float and not math.isfinite(value)):
        raise ValueError(text)
    return value


def point_id(point: Mapping[str, Any]) -> str:
    """Name of a point that depends on its parameters alone."""
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:16]


def options_of(point: Mapping[str, Any]) -> Options:
    """The options that a point stands for; dotted parameters become ``--set`` texts."""
    sets = tuple(f"{name}={value}" for name, value in point.items() if "." in name)
    plain: dict[str, Any] = {
        name: Path(value) if name in PATHS else value for name, value in point.items() if "." not in name
    }
    if "steps" in plain:
        plain["steps"] = str(plain["steps"])
    return Options(**plain, sets=sets)


def run_point(point: Mapping[str, Any], fast: bool) -> dict[str, Any]:
    """One line of the output: parameters, status ``ok``, ``infeasible`` or ``failed``, and figures or the reason."""
    from herald_sim.simulate import simulate

    line: dict[str, Any] = {"id": point_id(point), "parameters": dict(point)}
    try:
        options = options_of(point)
        pipeline, profile = options.pipeline(), options.profile()
        workload = options.workload(pipeline.settings)
        result = simulate(pipeline, profile, workload, memory=options.memory(profile), fast=fast).to_dict()
    except CapacityError as problem:
        first = str(problem).splitlines()[0]
        return {**line, "state": "infeasible", "reason": first.partition("does not fit: ")[2] or first}
    except HeraldError as problem:
        return {**line, "state": "failed", "reason": str(problem)}
    return {**line, "state": "ok", **{name: result[name] for name in _RESULT_KEYS if name in result}}


def sweep(points: Iterable[Point], out: Path, executor: "Workers", *, fast: bool = False) -> dict[str, Any]:
    """Run the points that ``out`` does not hold yet; returns the summary that it writes there.

    A point that is given again runs once; ``repeated`` in the summary counts such. One that the folder holds of another
    profile file, another model file or the other mode runs again; ``outdated`` counts those.
    """
    given = [(point_id(point), point) for point in points]
    unique = dict(given)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        message = f"cannot use {out} as the sweep's folder: {problem.strerror}; --out names a folder"
        raise ConfigError(message) from None
    bases = {name: basis(point, fast) for name, point in unique.items()}
    held = {line["id"]: line for line in read_points(out / POINTS)}
    done = {name: line for name, line in held.items() if line.get("basis") == bases.get(name)}
    wanted = [point for name, point in unique.items() if name not in done]
    outdated = sum(name in held and name not in done for name in unique)
    with (out / POINTS).open("a", encoding="utf-8") as file:
        for line in executor.run(wanted, fast):
            line["basis"] = bases[line["id"]]
            done[line["id"]] = line
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
    summary = {**summarise([done[name] for name in unique]), "repeated": len(given) - len(unique), "outdated": outdated}
    (out / SUMMARY).write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return summary


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, best point, and the points that no other beats in both throughput and block time."""
    feasible = [line for line in lines if line["state"] == "ok" and line.get("throughput_tok_s") is not None]
    best = max(feasible, key=lambda line: (line["throughput_tok_s"], line["id"]), default=None)
    front: list[dict[str, Any]] = []
    for line in sorted(feasible, key=lambda line: (line["block_time_s"], -line["throughput_tok_s"], line["id"])):
        if not front or line["throughput_tok_s"] > front[-1]["throughput_tok_s"]:
            front.append(line)
    states = [line["state"] for line in lines]
    keys = ("id", "parameters", "throughput_tok_s", "block_time_s")
    return {
        "points": len(lines),
        "ok": states.count("ok"),
        "infeasible": states.count("infeasible"),
        "failed": states.count("failed"),
        "best": None if best is None else {key: best[key] for key in keys},
        "pareto": [{key: line[key] for key in keys} for line in front],
        "left_out": _left_out(lines),
    }


def _left_out(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Why points gave no figures: each reason once, with the number of its points and the first of them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        if line["state"] == "ok":
            continue
        cause = {"state": line["state"], "reason": line.get("reason", "not said")}
        first = {**cause, "points": 0, "parameters": line["parameters"]}
        found.setdefault((cause["state"], cause["reason"]), first)["points"] += 1
    return list(found.values())


class Workers:
    """Where points run: any executor of :mod:`concurrent.futures`, made anew when one breaks."""

    def __init__(self, make: Any, slots: int) -> None:
        self._make = make
        self._slots = max(1, slots)

    def run(self, points: list[Point], fast: bool) -> Iterator[dict[str, Any]]:
        """Lines of ``points`` as they end. Points whose workers die are tried alone once more, then recorded failed."""
        suspects: list[Point] = []
        waiting = list(reversed(points))
        while waiting:
            with self._make(self._slots) as executor:
                yield from self._pass(executor, waiting, suspects, fast)
        for point in suspects:
            with self._make(1) as executor:
                try:
                    line = executor.submit(run_point, point, fast).result()
                except Exception as problem:  # whatever killed the worker is the point's result
                    line = _failed(point, problem)
            yield line

    def _pass(
        self, executor: Executor, waiting: list[Point], suspects: list[Point], fast: bool
    ) -> Iterator[dict[str, Any]]:
        flying: dict[Future[dict[str, Any]], Point] = {}
        try:
            while waiting or flying:
                while waiting and len(flying) < _IN_FLIGHT_PER_WORKER * self._slots:
                    point = waiting.pop()
                    flying[executor.submit(run_point, point, fast)] = point
                ended, _ = wait(flying, return_when=FIRST_COMPLETED)
                for future in ended:
                    problem = future.exception()
                    if isinstance(problem, BrokenProcessPool):
                        raise problem
                    point = flying.pop(future)
                    yield _failed(point, problem) if problem is not None else future.result()
        except BrokenProcessPool:
            # Which of the points in flight killed it is not known: each is tried alone.
            suspects += list(flying.values())
            if not flying and waiting:
                suspects.append(waiting.pop())


def _failed(point: Point, problem: BaseException) -> dict[str, Any]:
    reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return {"id": point_id(point), "parameters": dict(point), "state": "failed", "reason": reason}


def local_workers(count: int) -> Workers:
    """``count`` processes of this machine."""

    def make(slots: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(slots, mp_context=multiprocessing.get_context("spawn"))

    return Workers(make, count)


def dask_workers(address: str) -> Workers:
    """Workers of the dask cluster whose scheduler listens at ``address``."""
    try:
        import distributed
    except ImportError:
        message = "--on dask needs the package 'distributed': pip install 'herald[dask]'"
        raise ConfigError(message) from None
    cluster: Any = distributed
    try:
        client = cluster.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as problem:
        message = f"no dask scheduler at {address}: {read_failure(problem)}"
        raise ConfigError(message) from None

    @contextmanager
    def make(_slots: int) -> Iterator[Executor]:
        yield client.get_executor(retries=0, pure=False)

    return Workers(make, sum(client.nthreads().values()))
