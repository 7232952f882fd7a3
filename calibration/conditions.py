"""What a run may change beside its point (a paced link, fewer threads, keys alone), as changes of the prediction.

Each condition changes the profile by numbers that were measured apart from any run: the link's rate is the pace that
was set, and rates of the CPU at fewer threads come from the raw tables of ``selection`` and ``dram``. What a selection
reads of the keys, and where the exact layers attend, the description says itself.
"""

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from herald_pipeline.errors import ConfigError, ProfileError, check_number, did_you_mean, raise_problems
from herald_pipeline.hardware import Curve, Number, Profile, Quantity
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.settings import GATHERS
from herald_sim.explain import scaled

NAMES = ("link", "threads", "keys", "exact", "gather", "policy", "hbm")
"""GB/s of each direction; threads of the CPU kernels; ``only`` or ``int8``; ``gpu``; ``fused`` or ``gpu``; a batch
policy; GB (what fits, not how fast)."""
_KEYS = {"only": "key-only", "key-only": "key-only", "int8": "int8"}
_VALUES: Mapping[str, tuple[str, ...]] = {
    "keys": tuple(_KEYS),
    "exact": ("cpu", "gpu"),
    "gather": GATHERS,
    "policy": tuple(BatchPolicy),
}
Conditions = tuple[tuple[str, float | int | str], ...]


def check(conditions: Conditions) -> None:
    """Refuse a condition that nothing here knows how to predict.

    Raises
    ------
    ConfigError
        An unknown name or value, or a number that cannot be.
    """
    for name, value in conditions:
        if name not in NAMES:
            raise ConfigError(f"condition {name!r} is not known{did_you_mean(name, NAMES)}")
        if name not in _VALUES:
            raise_problems([check_number(_number(value), f"condition {name}", above=0, integer=name == "threads")])
        elif value not in _VALUES[name]:
            raise ConfigError(f"condition {name} must be one of {', '.join(_VALUES[name])}, got {value!r}")


def _number(value: float | int | str) -> float | int | str:
    """A number that stands as text, as in the name of a cell; other text as it is."""
    try:
        return (float if "." in str(value) else int)(value)
    except ValueError:
        return value


def settings(conditions: Conditions) -> dict[str, Any]:
    """Settings of the description that they change."""
    given = dict(conditions)
    changes = {"exact_layers_on": str(given["exact"])} if "exact" in given else {}
    if "gather" in given:
        changes["gather"] = str(given["gather"])
    if "keys" in given:
        changes["keys"] = _KEYS[str(given["keys"])]
    return changes


def under(profile: Profile, conditions: Conditions, raw: Path | None) -> Profile:
    """The profile as runs under ``conditions`` meet it; ``raw`` is the folder of the profile's raw tables."""
    for name, value in conditions:
        if name == "link":
            profile = _paced(profile, float(value))
        elif name == "threads":
            slower = slow_down(raw, int(value))
            profile = _engine(profile, dict.fromkeys(_SELECTION, 1 / slower["selection"]))
            profile = _many_queries(profile, share_of_threads(raw, int(value)), 1 / slower["selection"])
            gathers = ("gather_dram_efficiency", "fused_gather_dram_efficiency")
            profile = _engine(profile, dict.fromkeys(gathers, 1 / slower["dram"]))
    return profile


def dram_gb_s(profile: Profile, conditions: Conditions, raw: Path | None) -> float | None:
    """Host memory's read rate with the threads of a run, as the machine gave it while its selections were measured.

    That is the median of the plain reads right beside the selections, where the profile states them: its own rate is of
    another minute, and what a selection reaches of a run's rate is what it reached of the rate beside it.
    """
    dram, threads = profile.machine.dram, dict(conditions).get("threads")
    if dram.read_gb_s is None:
        return None
    rate = dram.read_gb_s.peak if dram.beside_selections_gb_s is None else median(dram.beside_selections_gb_s.values)
    return rate if threads is None else rate / slow_down(raw, int(threads))["dram"]


def dram_span(profile: Profile) -> tuple[float, float]:
    """How many times as slow the fastest and the slowest place of host memory read as their median.

    Both are 1 where the profile knows of no places.
    """
    places = profile.machine.dram.beside_selections_gb_s
    if places is None:
        return 1.0, 1.0
    middle = median(places.values)
    return middle / max(places.values), middle / min(places.values)


def slowed(profile: Profile, slower_dram: float = 1.0, slower_cpu: float = 1.0) -> Profile:
    """The profile on a host where reading memory, and what queries add to a selection, take so many times as long."""
    if slower_dram != 1.0:
        profile = scaled(profile, "dram", "read_gb_s", 1.0 / slower_dram)
    if slower_cpu != 1.0:
        profile = scaled(profile, "cpu", "attention_tflop_s", 1.0 / slower_cpu)
    return profile


_SELECTION = (
    "select_dram_efficiency",
    "select_keys_dram_efficiency",
    "select_int8_dram_efficiency",
    "select_flops_efficiency",
)
_BESIDE_A_SCAN = ("copy_beside_scan", "row_fetch_beside_scan")
_OF_THE_LINK = ("streamed_copy_efficiency", "scattered_copy_efficiency", "row_fetch_efficiency")


def slow_down(raw: Path | None, threads: int) -> dict[str, float]:
    """How much longer selection, and a read of DRAM, take on ``threads`` threads, read from the raw tables.

    Raises
    ------
    ProfileError
        The tables are not beside the profile, or do not reach as far down.
    """
    found = {}
    for name in ("selection", "dram"):
        seconds = _by_threads(raw, name)
        at = sorted(seconds)
        if len(at) < 2 or threads < at[0]:
            where = "nowhere" if raw is None else str(raw / f"{name}.csv")
            raise ProfileError(
                f"threads {threads}: {where} holds no times by threads from there on; measure the machine with its raw "
                "tables kept beside the profile"
            )
        times = np.interp(np.log(min(threads, at[-1])), np.log(at), [np.log(seconds[n]) for n in at])
        found[name] = float(np.exp(times)) / seconds[at[-1]]
    return found


def share_of_threads(raw: Path | None, threads: int) -> float:
    """``threads`` over those that the profile was measured with; more of them are no more than measured."""
    most = max(_by_threads(raw, "selection"), default=threads)
    return min(threads, most) / most


def _by_threads(raw: Path | None, name: str) -> Mapping[int, float]:
    """Threads -> seconds of the same work: the largest that was done with more than one count."""
    file = None if raw is None else raw / f"{name}.csv"
    if file is None or not file.is_file():
        return {}
    groups: dict[tuple[str, ...], dict[int, float]] = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if not row.get("threads"):
                continue
            key = tuple(row.get(column) or "" for column in ("rows", "context", "queries"))
            groups.setdefault(key, {})[int(row["threads"])] = float(row["seconds"])
    return max(groups.values(), key=lambda group: (len(group), max(group.values())), default={})


def _paced(profile: Profile, gb_s: float) -> Profile:
    """A token bucket on each direction: no size of copy passes faster."""
    link = profile.machine.link
    capped: dict[str, Any] = {
        name: _mapped(quantity, lambda y: min(y, gb_s))
        for name in ("h2d_gb_s", "d2h_gb_s")
        if (quantity := getattr(link, name)) is not None
    }
    # Shares of layer-wise and scattered copies are shares of the unpaced rate: the bucket is what they end at now.
    free = 1.0 if link.h2d_gb_s is None else link.h2d_gb_s.peak
    lifted = {
        name: min(1.0, quantity.peak * free / min(free, gb_s))
        for name in _OF_THE_LINK
        if (quantity := getattr(profile.engine, name)) is not None
    }
    shares: dict[str, Any] = {
        name: Number(value, "share", getattr(profile.engine, name).origin) for name, value in lifted.items()
    }
    # A copy that memory slows down beside a scan does not wait for the bucket as well: the slower of both decides.
    pace = min(1.0, gb_s / free)
    longer: dict[str, Any] = {
        name: _mapped(quantity, lambda y: max(1.0, y * pace))
        for name in _BESIDE_A_SCAN
        if (quantity := getattr(profile.engine, name)) is not None
    }
    engine = replace(profile.engine, **shares, **longer)
    return replace(profile, machine=replace(profile.machine, link=replace(link, **capped)), engine=engine)


def _engine(profile: Profile, factors: Mapping[str, float]) -> Profile:
    changed: dict[str, Any] = {
        name: _mapped(quantity, lambda y, f=factor: y * f)
        for name, factor in factors.items()
        if (quantity := getattr(profile.engine, name)) is not None
    }
    return replace(profile, engine=replace(profile.engine, **changed))


def _many_queries(profile: Profile, share: float, of_one: float) -> Profile:
    """Arithmetic of several queries, which threads alone bound, at ``share`` of its rate in place of ``of_one``."""
    found = profile.engine.select_flops_efficiency
    if not isinstance(found, Curve):
        return profile
    y = tuple(y if x <= 1 else y * share / of_one for x, y in zip(found.x, found.y, strict=True))
    return replace(profile, engine=replace(profile.engine, select_flops_efficiency=replace(found, y=y)))


def _mapped(quantity: Quantity, change: Any) -> Quantity:
    if isinstance(quantity, Curve):
        return replace(quantity, y=tuple(change(y) for y in quantity.y))
    return replace(quantity, value=change(quantity.value))
