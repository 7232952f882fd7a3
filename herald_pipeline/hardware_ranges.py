"""Which numbers of a profile can be: impossible ones are refused, doubtful ones warned about, all at once."""

import math
from collections.abc import Mapping

from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import DESCRIPTIVE, MAX_FITTED, Link, LinkKind, Profile, Quantity, Spec

USUAL: Mapping[str, tuple[float, float]] = {
    "GB/s": (1.0, 10_000.0),
    "TFLOP/s": (0.05, 5_000.0),
    "GB": (1.0, 10_000.0),
    "us": (0.0, 10_000.0),
    "share": (0.01, 1.0),
    "passes": (1.0, 100.0),
    "kernels": (1.0, 200.0),
    "rows": (1.0, 512.0),
    "B": (1.0, 8.0),
    "x": (1.0, 8.0),
}
"""What parts and programs are known to reach, by unit: the smallest and the largest."""
FAR = 1000.0
"""Factor beyond the usual range from which on a number is doubted aloud; what-ifs stay far within it."""
SMALLEST, LARGEST = 1e-6, 1e12
"""Beyond these, times of a run leave what nanoseconds and floats can hold."""


def check_ranges(profile: Profile, where: str = "profile") -> list[str]:
    """Warnings about doubtful numbers; :class:`ConfigError` with all impossible ones."""
    problems: list[str] = []
    for path, spec, quantity in profile.quantities():
        if quantity is not None:
            problems += _range_problems(path, spec, quantity)
    if len(profile.fitted()) > MAX_FITTED:
        problems.append(f"fitted: {len(profile.fitted())} numbers; a profile may hold at most {MAX_FITTED}")
    warnings = _link_problems(profile.machine.link, problems)
    warnings += [w for path, spec, quantity in profile.quantities() for w in _doubts(path, spec, quantity)]
    if profile.machine.gpu.count > 1:
        warnings.append(f"machine.gpu.count = {profile.machine.gpu.count}: {DESCRIPTIVE['machine.gpu.count']}")
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    return [f"{where}: {warning}" for warning in warnings]


def _range_problems(path: str, spec: Spec, quantity: Quantity) -> list[str]:
    problems = []
    for value in quantity.values:
        if not math.isfinite(value):
            problems.append(f"{path} must be finite, got {value!r}")
        elif value < 0 or (value == 0 and spec.unit != "us"):
            bound = ">= 0" if spec.unit == "us" else "> 0"
            problems.append(f"{path} must be {bound} {spec.unit}, got {value!r}")
        elif spec.maximum is not None and value > spec.maximum:
            problems.append(f"{path} must be <= {spec.maximum:g} (a share of a raw rate), got {value!r}")
        elif spec.minimum is not None and value < spec.minimum:
            problems.append(
                f"{path} must be >= {spec.minimum:g} (a time over the time alone), got {value!r}; {_usual(spec)}"
            )
        elif value and not SMALLEST <= value <= LARGEST:
            problems.append(
                f"{path} must lie between {SMALLEST:g} and {LARGEST:g} {spec.unit}, or times leave what nanoseconds "
                f"can hold, got {value!r}; {_usual(spec)}"
            )
    return problems


def _doubts(path: str, spec: Spec, quantity: Quantity | None) -> list[str]:
    """Warnings about values that no part or program is known to come near."""
    if quantity is None:
        return []
    low, high = USUAL[spec.unit]
    # A curve of shares may begin at next to nothing, where the work is small: what it rises to tells.
    values = (max(quantity.values),) if spec.unit == "share" else quantity.values
    return [
        f"{path} = {value:g} {spec.unit} is more than {FAR:g} times {'below' if value < low else 'above'} what there "
        f"is; {_usual(spec)}"
        for value in values
        if not low / FAR <= value <= high * FAR
    ]


def _usual(spec: Spec) -> str:
    low, high = USUAL[spec.unit]
    return f"usual: {low:g} to {high:,.0f} {spec.unit}"


def _link_problems(link: Link, problems: list[str]) -> list[str]:
    """Warnings about the link; impossible rates are added to ``problems``."""
    if link.kind is not LinkKind.PCIE:
        return []
    raw, coded = link.raw_gb_s, link.coded_gb_s
    assert raw is not None
    assert coded is not None
    name = f"PCIe {link.generation} x{link.lanes}"
    warnings = []
    for key, directions in (("h2d_gb_s", 1), ("d2h_gb_s", 1), ("duplex_gb_s", 2)):
        quantity = getattr(link, key)
        if quantity is None:
            continue
        rate = quantity.peak
        if rate > raw * directions:
            problems.append(
                f"machine.link.{key} = {rate:g} GB/s is above the raw rate of {name}, {raw * directions:.1f} GB/s "
                f"({coded * directions:.1f} GB/s after line coding); state what a large pinned copy reaches"
            )
        elif rate > coded * directions:
            warnings.append(
                f"machine.link.{key} = {rate:g} GB/s is above the {coded * directions:.1f} GB/s that {name} leaves "
                "after line coding"
            )
    return warnings
