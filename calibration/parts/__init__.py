"""The parts of a measurement: one module each, with ``measure(bench) -> Part``; raw rates come before shares."""

from collections.abc import Callable
from importlib import import_module

from calibration.bench import Bench, Part

NAMES = (
    "memory",
    "dram",
    "attention",
    "gemm",
    "sampler",
    "proxy",
    "grouped-gemm",
    "copies",
    "selection",
    "gather",
    "launch",
    "contention",
    "load",
)
"""In the order in which they run: what fewest methods are priced by comes last, for a measurement that is cut off."""


def get(name: str) -> Callable[[Bench], Part]:
    """``measure`` of the part called ``name``."""
    module = import_module(f"calibration.parts.{name.replace('-', '_')}")
    measure: Callable[[Bench], Part] = module.measure
    return measure
