"""A run outside what was measured says what it left, and still what binds."""

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.explain import explain
from herald_sim.simulate import simulate
from herald_sim.text import explanation_text, result_text

WORK = Workload.uniform(32768, 80, gen_tokens=128, steps=20)


@pytest.fixture(scope="module")
def setting():
    return build(catalogue.resolve("llada2-mini"), "herald"), hardware_io.resolve("h200-141g_emr-16vcpu-3")


def test_a_run_names_the_curves_that_it_left_and_what_binds(setting):
    result = simulate(*setting, WORK)
    assert "select_dram_efficiency" in result.to_dict()["extrapolated"]
    text = result_text(result)
    assert "EXTRAPOLATED, BOUND BY cpu selection" in text
    assert "outside what was measured: " in text


def test_an_explanation_says_what_binds_outside_what_was_measured_too(setting):
    assert "EXTRAPOLATED, BOUND BY cpu selection" in explanation_text(explain(*setting, WORK)).splitlines()[0]


def test_a_run_on_single_numbers_left_nothing(setting):
    result = simulate(setting[0], hardware_io.resolve("h100-sxm-80g_xeon-8481c"), WORK)
    assert result.status == "BOUND BY cpu selection"
    assert "extrapolated" not in result.to_dict()
    assert "outside what was measured" not in result_text(result)


def test_kv_in_8_bits_is_said_to_rest_on_kernels_that_read_16(setting):
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    small = Workload.uniform(4096, 2, gen_tokens=64, steps=4)
    plain = simulate(setting[0], profile, small)
    eight = build(catalogue.resolve("llada2-mini"), "herald", kv_dtype="fp8", dram_kv_dtype="fp8")
    added = set(simulate(eight, profile, small).assumptions) - set(plain.assumptions)
    assert added == {"KV in fp8: kernels keep the profile's efficiencies; none that reads it was measured"}
