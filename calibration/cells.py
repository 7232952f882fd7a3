"""Runs that ``python -m benchmarks.gpu`` left, as samples: a device runs each cell once, for tables and for reconcile.

What a cell changes of the machine (a paced link, fewer threads, keys alone) becomes a condition of its point; a cell
that failed, or that is no run, has nothing to compare.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.points import HELD_OUT, Point
from calibration.runs import FIGURES, Sample
from herald_pipeline.errors import ConfigError, check_number, raise_problems, read_failure

Say = Callable[[str], None]
POINT_KEYS = frozenset({"T", "blocks", "budget"})
"""Options of a cell that a point states as well."""
_READ_RATE = "pool_read_gb_s"
"""Of a cell's ``host_rates``: the read rate of the memory that the run's pool lay in. That of any other memory
(``dram_read_gb_s``) says little of the run: a virtual machine's places differ by 1.5 times. On two machines it read 125
to 159 GB/s around runs, and HERALD's selections (32K x 80) had 98 and 96, those of three others 89 to 96
(docs/measured-on-h200.md)."""
_ARITHMETIC = ("amx_tflop_s", "bf16_dot_tflop_s", "fma_tflop_s")
"""The same of the kernels' widest arithmetic: a machine has one of them."""
_MANY_QUERIES = "many_queries_gb_s"
"""The same of what many queries add to reading, in selections timed beside a run of many queries."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One cell's run: its sample, what it changed, and the model it ran."""

    name: str
    sample: Sample
    options: dict[str, Any]
    model: str


def read_runs(folder: Path, say: Say) -> list[Ran]:
    """All runs of a folder of cells.

    Raises
    ------
    ConfigError
        No file of the folder is a run that ended well, or one is no JSON object.
    """
    found = list(runs_of(folder, say))
    if not found:
        raise ConfigError(
            f"{folder} holds no run that ended well; python -m benchmarks.gpu --plan table2 --out {folder} makes some"
        )
    return found


def runs_of(folder: Path, say: Say) -> Iterator[Ran]:
    """Runs of a folder of cells that ended well, of which there may be none."""
    for path, document in documents(folder):
        yield from _read(path, document, say)


def read_cells(folder: Path, model: str, say: Say) -> list[Sample]:
    """Samples of the runs of ``model``, each with the conditions that it met."""
    kept = []
    for run in read_runs(folder, say):
        if run.model != model:
            say(f"{run.name}: left out, it ran {run.model}")
        else:
            kept.append(run.sample)
    if not kept:
        raise ConfigError(f"{folder} holds no run of {model}; give --model as the cells had it")
    return kept


def documents(folder: Path, pattern: str = "*.json") -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file of a folder that holds a JSON object, with that object.

    Raises
    ------
    ConfigError
        There is no such folder, or a file of it is no JSON: cut off, or of something else.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; --measured takes what python -m benchmarks.gpu --out made")
    for path in sorted(folder.glob(pattern)):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
            raise ConfigError(
                f"{path} is no JSON ({read_failure(problem)}); take it away, and python -m benchmarks.gpu runs its "
                "cell again"
            ) from None
        if isinstance(document, dict):
            yield path, document


def unreadable(path: Path, problem: Exception) -> ConfigError:
    """A cell's file that is JSON but not what ``python -m benchmarks.gpu`` writes."""
    lacks = f"it lacks {problem}" if isinstance(problem, KeyError) else str(problem)
    return ConfigError(
        f"{path} is no result of python -m benchmarks.gpu: {lacks}; take it away, and that command runs its cell again"
    )


def failed(document: dict[str, Any], say: Say) -> bool:
    """Whether a cell ended in an error, which is said."""
    if "error" not in document:
        return False
    say(f"{document.get('cell')}: left out, it failed: {str(document['error'])[:120]}")
    return True


def _read(path: Path, document: dict[str, Any], say: Say) -> Iterator[Ran]:
    if not str(document.get("cell", "")).startswith("run:") or failed(document, say):
        return
    try:
        result = _configured(document)
        if result is None:
            say(f"{document['cell']}: left out, its configuration is neither in its result nor in its name")
            return
        raise_problems(
            check_number(value, name, minimum=0)
            for name, value in (*result.items(), *_stage_numbers(result))
            if name in FIGURES or name.startswith("stages.")
            if value is not None
        )
        raise_problems(check_number(rate, "read rate beside the run", above=0) for rate in pool_rates(result))
        check_arithmetic(result)
        ran = Ran(str(document["cell"]), _sample(result), dict(result["options"]), str(result["model"]))
    except ConfigError as problem:
        raise ConfigError([f"{path}: {found}" for found in problem.problems]) from None
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise unreadable(path, problem) from None
    yield ran


def _stage_numbers(result: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for stage, sums in result.get("stages", {}).items():
        for name in ("busy_s", "count"):
            yield f"stages.{stage}.{name}", sums[name]
    for stage, value in result.get("stage_ms_median", {}).items():
        yield f"stages.{stage}.median", value


def pool_rates(result: Mapping[str, Any]) -> list[Any]:
    """GB/s of reading the memory of a cell's own pool, before and after; nothing where it has none."""
    return list(dict(result.get("host_rates", {})).get(_READ_RATE, ()))


def arithmetic_rates(result: Mapping[str, Any]) -> list[Any]:
    """TFLOP/s of the kernels' widest arithmetic before and after what a cell measured; nothing where it has none."""
    rates = dict(result.get("host_rates", {}))
    return next((list(rates[name]) for name in _ARITHMETIC if name in rates), [])


def many_queries_rates(result: Mapping[str, Any]) -> list[Any]:
    """GB/s that the work of many queries allows, before and after what a cell measured; nothing where it has none."""
    return list(dict(result.get("host_rates", {})).get(_MANY_QUERIES, ()))


def check_arithmetic(result: Mapping[str, Any]) -> None:
    """Refuse rates of arithmetic that no machine has.

    Raises
    ------
    ConfigError
        Zero, negative, not finite or no number.
    """
    rates = arithmetic_rates(result) + many_queries_rates(result)
    raise_problems(check_number(rate, "rate of arithmetic beside the run", above=0) for rate in rates)


def _unsteady(rates: Sequence[float]) -> float | None:
    return max(rates) / min(rates) - 1 if len(rates) > 1 else None


_OLD_NAMES = {"exact_layers_on": "exact", "key_only": "keys"}
"""Options as the first runs' files name them -> those of ``python -m benchmarks.gpu``."""


def _configured(document: dict[str, Any]) -> dict[str, Any] | None:
    """The result with its configuration: as it states it, or as the first runs stood in name and document."""
    result: dict[str, Any] = document.get("result", {})
    if "context" in result:
        return {"options": {}, **result}
    if "context" not in document or "batch" not in result:
        return None
    options: dict[str, Any] = {}
    for part in str(document["cell"]).split(":")[3:]:
        key, _, value = part.partition("=")
        options[_OLD_NAMES.get(key, key)] = "only" if key == "key_only" else value
    names = ("context", "steps", "blocks")
    stated = {name: document[name] for name in names if name in document}
    return {"block_length": 32, "kv_dtype": "bf16", **result, **stated, "options": options}


def _sample(result: dict[str, Any]) -> Sample:
    options = result["options"]
    met = tuple(sorted((name, value) for name, value in options.items() if name not in POINT_KEYS))
    point = Point(
        str(result["method"]),
        int(result["context"]),
        int(result["batch"]),
        int(result["steps"]),
        int(result["blocks"]),
        int(result["block_length"]),
        str(result["kv_dtype"]),
        float(options["budget"]) if "budget" in options else None,
        HELD_OUT,
        met,
    )
    figures = {name: float(result[name]) for name in FIGURES if result.get(name)}
    sums = result.get("stages", {})
    means = {name: each["busy_s"] / each["count"] for name, each in sums.items() if each["count"]}
    # Of a launch that nothing disturbs, as of runs that reconcile makes itself; the first cells state sums alone.
    medians = {name: float(ms) / 1e3 for name, ms in result.get("stage_ms_median", {}).items() if name in means}
    stages = {name: medians.get(name) or mean for name, mean in means.items()}
    tails = {name: means[name] / median for name, median in medians.items() if median}
    total = sum(each["busy_s"] for each in sums.values())
    shares = {name: each["busy_s"] / total for name, each in sums.items()} if total else {}
    read, peaks, queries = pool_rates(result), arithmetic_rates(result), many_queries_rates(result)
    return Sample(
        point,
        figures,
        stages,
        None,
        shares,
        _unsteady(read),
        tails,
        statistics.fmean(read) if read else None,
        statistics.fmean(peaks) if peaks else None,
        statistics.fmean(queries) if queries else None,
        _unsteady(queries or peaks),
    )
