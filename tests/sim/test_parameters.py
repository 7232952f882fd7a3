"""Every number of a profile changes something that a command prints, or `--set` says why it cannot."""

import pytest

from herald_pipeline import capacity, catalogue, hardware_io
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import DESCRIPTIVE, SECTIONS
from herald_pipeline.hardware_ranges import LARGEST, SMALLEST
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.ceilings import ceilings
from herald_sim.simulate import simulate

HARDWARE = "h100-sxm-80g_xeon-8481c"
MODEL = catalogue.get("llada2-mini")
POINTS = (("dense", 2), ("herald", 32), ("mage-offload", 32), ("infinigen", 16), ("mage-cpu", 8))
OTHER_WAYS = ({}, {"gather": "fused", "keys": "int8"}, {"gather": "gpu", "keys": "key-only"})
MANY = 96
"""Requests of which a layer's rows are still on their way when the next selection begins."""
PAPER = hardware_io.resolve(HARDWARE)
FIELDS = {
    path.replace("engines.sglang-paper", "engine"): (spec, value)
    for path, spec, value in PAPER.quantities()
    if path not in DESCRIPTIVE
}
UNSTATED = {"us": 20.0, "share": 0.5, "GB": 1.0, "GB/s": 30.0, "x": 2.0}
"""A value to begin at where the paper's profile states none."""


def values(path):
    """A value of the field and another one: twice it, or half where twice would be more than there can be."""
    spec, stated = FIELDS[path]
    value = UNSTATED[spec.unit] if stated is None else stated.peak
    if stated is None or path.startswith("machine.link"):
        return value, value / 2
    return value, value / 2 if spec.maximum is not None and 2 * value > spec.maximum else 2 * value


def outputs(profile):
    """What commands print, cheapest first."""
    yield [row["value_tok_s"] for row in ceilings(MODEL, profile, 16384)]
    memory = Memory.of(profile)
    yield [capacity.budget(build(MODEL, method), 16384, batch, memory).as_dict() for method, batch in POINTS]
    runs = [
        *((method, batch, {}) for method, batch in POINTS),
        *(("herald", MANY, settings) for settings in OTHER_WAYS),
        ("step-fetch", 4, {"gather": "gpu"}),
    ]
    for method, batch, settings in runs:
        workload = Workload.uniform(16384, batch, gen_tokens=96)
        found = simulate(build(MODEL, method, **settings), profile, workload, beyond_memory=True).to_dict()
        yield {name: value for name, value in found.items() if name != "provenance"}


@pytest.mark.parametrize("path", sorted(FIELDS))
def test_every_number_changes_something_that_is_printed(path):
    one, other = (hardware_io.resolve(HARDWARE, None, [f"{path}={value!r}"]) for value in values(path))
    assert any(a != b for a, b in zip(outputs(one), outputs(other), strict=True)), path


def numbers_that_may_describe():
    for section in SECTIONS:
        part = getattr(PAPER.machine, section)
        for name in type(part).__slots__:
            if type(getattr(part, name)) is int:
                yield f"machine.{section}.{name}", getattr(part, name)
    yield "machine.cpu.peak_tflop_s", 20.0
    yield "machine.cpu.many_queries_gb_s", 40.0
    yield "machine.dram.beside_selections_gb_s", 100.0


@pytest.mark.parametrize(("path", "value"), list(numbers_that_may_describe()))
def test_a_number_that_nothing_is_computed_from_is_refused_with_the_reason(path, value):
    with pytest.raises(ConfigError) as refused:
        hardware_io.resolve(HARDWARE, None, [f"{path}={2 * value}"])
    said = str(refused.value)
    assert path in said
    assert DESCRIPTIVE[path] in said if path in DESCRIPTIVE else "must be <=" in said


@pytest.mark.parametrize("lanes", ["generation=3", "lanes=8"])
def test_what_bounds_the_links_rate_is_held_against_it(lanes):
    with pytest.raises(ConfigError, match=r"h2d_gb_s = 27\.68 GB/s is above the raw rate"):
        hardware_io.resolve(HARDWARE, None, [f"machine.link.{lanes}"])


@pytest.mark.parametrize("path", sorted(path for path, (spec, _) in FIELDS.items() if spec.unit != "share"))
@pytest.mark.parametrize("value", [1e30, 1e300, 1e-300])
def test_a_number_that_arithmetic_cannot_hold_is_refused_with_the_usual_range(path, value):
    with pytest.raises(ConfigError) as refused:
        hardware_io.resolve(HARDWARE, None, [f"{path}={value!r}"])
    assert path.rpartition(".")[2] in str(refused.value)
    assert "usual: " in str(refused.value) or "raw rate" in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value", "doubted"),
    [
        ("machine.dram.read_gb_s", 1e9, True),
        ("machine.dram.read_gb_s", 3072.0, False),
        ("machine.gpu.peak_tflop_s", 1e-6, True),
        ("machine.gpu.memory_gb", 1e8, True),
        ("engine.sampler_passes", 1e6, True),
        ("engine.layer_overhead_us", 0.0, False),
    ],
)
def test_a_number_a_thousand_times_beyond_what_there_is_is_doubted_aloud(path, value, doubted):
    warnings = hardware_io.resolve(HARDWARE, None, [f"{path}={value!r}"]).warnings
    assert any(path.rpartition(".")[2] in warning and "usual: " in warning for warning in warnings) is doubted


@pytest.mark.parametrize("path", ["machine.dram.read_gb_s", "machine.gpu.bandwidth_gb_s", "machine.gpu.peak_tflop_s"])
@pytest.mark.parametrize("value", [SMALLEST, LARGEST])
def test_the_ends_of_what_is_accepted_can_be_simulated(path, value):
    profile = hardware_io.resolve(HARDWARE, None, [f"{path}={value!r}"])
    workload = Workload.uniform(16384, 8, gen_tokens=96)
    assert simulate(build(MODEL, "herald"), profile, workload, check=True).throughput_tok_s > 0
