"""Machines and engines: every number with its unit and where it comes from.

A **machine** is what the hardware can do (memory, raw rates). An **engine** is what a serving program makes of it
(overheads, efficiencies, memory it keeps for itself). A **profile** is one of each; the simulator and capacity read
nothing else. Profiles are TOML files, read by :mod:`herald_pipeline.hardware_io`.

Efficiencies are shares of a raw rate of the same profile, so that halving a raw rate halves what depends on it.
"""

# ruff: noqa: RUF009 - quantity_field makes the field itself, so that unit and measurer stand beside the name

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from herald_pipeline.engine import Engine
from herald_pipeline.errors import ProfileError
from herald_pipeline.quantities import (
    Curve,
    Number,
    Origin,
    Provenance,
    Quantity,
    Reading,
    Spec,
    known,
    quantity_field,
)

__all__ = [
    "DESCRIPTIVE",
    "MAX_FITTED",
    "SECTIONS",
    "Cpu",
    "Curve",
    "Dram",
    "Engine",
    "Gpu",
    "Link",
    "LinkKind",
    "Machine",
    "Number",
    "Origin",
    "Profile",
    "Provenance",
    "Quantity",
    "Reading",
    "Spec",
    "known",
    "specs",
]

MAX_FITTED = 13
"""Most fitted numbers that a profile may hold; none depends on a model, a method or a context."""

DESCRIPTIVE: Mapping[str, str] = {
    "machine.gpu.count": "one device is priced; a second one is another link, memory and host share of its own",
    "machine.cpu.cores": "what the cores reach together is priced: cpu.attention_tflop_s and dram.read_gb_s",
    "machine.cpu.threads": "what the threads reach together is priced: cpu.attention_tflop_s and dram.read_gb_s",
    "machine.cpu.peak_tflop_s": "what selections reach is priced: cpu.attention_tflop_s",
    "machine.cpu.many_queries_gb_s": "what selections reach is priced: cpu.attention_tflop_s",
    "machine.dram.beside_selections_gb_s": "what reads host memory is priced by dram.read_gb_s",
}
"""Numbers that describe a machine and that nothing is computed from, with what is computed from instead."""

# GB/s of 16 lanes and one direction: 2 GT/s.. doubled per generation. Above it a rate is impossible.
_RAW_GB_S_X16 = {1: 4.0, 2: 8.0, 3: 16.0, 4: 32.0, 5: 64.0, 6: 128.0}
# Line code 128b/130b (8b/10b before generation 3; FLIT mode in 6): above it a measurement is doubtful.
_CODED_SHARE = {1: 0.8, 2: 0.8, 3: 128 / 130, 4: 128 / 130, 5: 128 / 130, 6: 242 / 256}


@dataclass(frozen=True, slots=True)
class Gpu:
    """The processor that denoises. ``emulated``: a CPU core plays it, on a machine without a GPU."""

    name: str = ""
    count: int = 1
    dtype: str = "bf16"
    emulated: bool = False
    memory_gb: Quantity | None = quantity_field("GB", "memory")
    bandwidth_gb_s: Quantity | None = quantity_field("GB/s", "attention")
    peak_tflop_s: Quantity | None = quantity_field("TFLOP/s", "gemm")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor that selects; ``cores`` and ``threads`` describe, the rate of attention is priced.

    ``peak_tflop_s`` is what the kernels' widest arithmetic reached alone while selections were measured, and
    ``many_queries_gb_s`` the rate of K and V that the work of a block's queries allowed then, reading apart. They price
    nothing: on a virtual machine both change within minutes, and a run's are held against them.
    """

    name: str = ""
    cores: int = 1
    threads: int = 1
    capability: str = ""
    attention_tflop_s: Quantity | None = quantity_field("TFLOP/s", "selection", "select")
    peak_tflop_s: Quantity | None = quantity_field("TFLOP/s", "selection", optional=True)
    many_queries_gb_s: Quantity | None = quantity_field("GB/s", "selection", optional=True)


@dataclass(frozen=True, slots=True)
class Dram:
    """Host memory. ``read_gb_s`` is the raw streaming rate of all threads together.

    ``beside_selections_gb_s`` is the same rate right beside the selections that the profile was measured with, over the
    place of what was read (GB, from the begin of a pool that takes most of host memory to the middle of what was read).
    It prices nothing: what selections reached is a share of its median, and a run's own rate is held against that.
    Absent: memory was read in one place, at ``read_gb_s``.
    """

    capacity_gb: Quantity | None = quantity_field("GB", "memory")
    read_gb_s: Quantity | None = quantity_field(
        "GB/s", "dram", "select", "select_keys", "select_int8", "gather", "gather_fused", "proxy"
    )
    beside_selections_gb_s: Quantity | None = quantity_field("GB/s", "selection", optional=True)


class LinkKind(StrEnum):
    """What joins host and device."""

    PCIE = "pcie"
    MEMCPY = "memcpy"
    """A copy within host memory stands for the link, on a machine without a GPU."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link between host and device; rates are of large pinned copies in one direction.

    ``duplex_gb_s`` bounds both directions together; absent, the directions do not disturb each other.
    """

    kind: LinkKind = LinkKind.PCIE
    generation: int = 4
    lanes: int = 16
    h2d_gb_s: Quantity | None = quantity_field("GB/s", "copies", "copy")
    d2h_gb_s: Quantity | None = quantity_field("GB/s", "copies", "copy")
    duplex_gb_s: Quantity | None = quantity_field("GB/s", "copies", optional=True)

    @property
    def raw_gb_s(self) -> float | None:
        """Lane rate of one direction before line coding; nothing is faster. ``None`` where there are no lanes."""
        if self.kind is not LinkKind.PCIE:
            return None
        return _RAW_GB_S_X16[self.generation] * self.lanes / 16

    @property
    def coded_gb_s(self) -> float | None:
        """Lane rate after line coding: what is left for packets."""
        raw = self.raw_gb_s
        return None if raw is None else raw * _CODED_SHARE[self.generation]


@dataclass(frozen=True, slots=True)
class Machine:
    """One host with its device and the link between them."""

    name: str
    gpu: Gpu = field(default_factory=Gpu)
    cpu: Cpu = field(default_factory=Cpu)
    dram: Dram = field(default_factory=Dram)
    link: Link = field(default_factory=Link)


SECTIONS = ("gpu", "cpu", "dram", "link")


def specs(cls: type[Any]) -> dict[str, Spec]:
    """The quantities that a section may state, by field name."""
    return {f.name: f.metadata["spec"] for f in fields(cls) if "spec" in f.metadata}


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine and an engine, with where they were read and what was changed for this run.

    Attributes
    ----------
    engines
        All engines that the machine's file states.
    warnings
        What is possible but doubtful, for the user to see.
    overrides
        ``path=value`` texts of ``--set``.
    """

    name: str
    machine: Machine
    engine: Engine
    title: str = ""
    notes: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    source: str = ""
    warnings: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def quantities(self) -> Iterator[tuple[str, Spec, Quantity | None]]:
        """Every quantity of machine and engine: its path in the file, what it expects, what is stated."""
        parts = [(f"machine.{section}", getattr(self.machine, section)) for section in SECTIONS]
        parts.append((f"engines.{self.engine.name}", self.engine))
        for prefix, part in parts:
            for name, spec in specs(type(part)).items():
                yield f"{prefix}.{name}", spec, getattr(part, name)

    def fitted(self) -> dict[str, Quantity]:
        """The fitted quantities by path."""
        return {
            path: quantity
            for path, _, quantity in self.quantities()
            if quantity is not None and quantity.origin.provenance is Provenance.FITTED and not quantity.origin.same_as
        }

    def provenances(self) -> tuple[Provenance, ...]:
        """The provenances that occur, in the order of :class:`Provenance`."""
        found = {quantity.origin.provenance for _, _, quantity in self.quantities() if quantity is not None}
        return tuple(p for p in Provenance if p in found)

    def missing(self, needs: Collection[str]) -> list[tuple[str, str]]:
        """Paths of the quantities that ``needs`` ask for and nobody stated, each with what measures it.

        ``needs`` holds op kinds and copy layouts of the pipeline; what every run needs is always included.
        """
        wanted = {"always", *needs}
        return [
            (path, spec.measured_by)
            for path, spec, quantity in self.quantities()
            if quantity is None and wanted.intersection(spec.needed_for)
        ]

    def check_complete(self, needs: Collection[str], complete: Collection[str] = ()) -> None:
        """Raise :class:`ProfileError` unless everything that a run reads is there.

        Called before the first event. ``complete`` names profiles that have it all, for the message.
        """
        missing = self.missing(needs)
        if not missing:
            return
        lines = [
            f"profile {self.name!r}, engine {self.engine.name!r}: {len(missing)} number(s) of this run are missing:"
        ]
        lines += [f"  {path}: `python -m calibration measure --only {part}` measures it" for path, part in missing]
        lines.append(f"complete profiles: {', '.join(complete) or 'none'}")
        raise ProfileError("\n".join(lines))
