"""A throughput that rests on prices outside what was measured says which curves it left, and still what binds.

The machine's curves end at the shapes of what was measured there: Dense at 32K with 38 requests, HERALD with 80.
"""

from dataclasses import replace

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.hardware import Curve
from herald_pipeline.pipeline import build
from herald_pipeline.workload import RequestSpec, Workload
from herald_sim.explain import explain
from herald_sim.op_times import MARGIN
from herald_sim.simulate import simulate
from herald_sim.text import explanation_text, result_text

LLADA = catalogue.resolve("llada2-mini")
H200 = hardware_io.resolve("h200-141g_emr-16vcpu-8")
BEYOND = Workload.uniform(40960, 70, gen_tokens=128, steps=20)


def run(method, context, batch, gen_tokens=512, **options):
    return simulate(build(LLADA, method), H200, Workload.uniform(context, batch, gen_tokens=gen_tokens), **options)


@pytest.mark.parametrize(("method", "batch", "binds"), [("dense", 38, "gpu"), ("herald", 80, "cpu selection")])
@pytest.mark.parametrize("fast", [False, True])
def test_a_run_at_a_point_that_was_measured_left_nothing(method, batch, binds, fast):
    result = run(method, 32768, batch, fast=fast)
    assert result.status == f"BOUND BY {binds}"
    assert "extrapolated" not in result.to_dict()


def test_what_prefill_left_is_said_with_its_time_alone():
    result = run("dense", 32768, 38, gen_tokens=128)
    assert "gemm_efficiency" in result.to_dict()["prefill_extrapolated"]
    lines = result_text(result).splitlines()
    said = [line for line in lines if "outside what was measured" in line]
    assert [line.split()[0] for line in said] == ["prefill"]


def test_a_run_names_the_curves_that_its_blocks_left_and_what_binds():
    result = simulate(build(LLADA, "herald"), H200, BEYOND)
    assert "select_dram_efficiency" in result.to_dict()["extrapolated"]
    assert "gemm_efficiency" not in result.to_dict()["extrapolated"]
    text = result_text(result)
    assert "EXTRAPOLATED, BOUND BY cpu selection" in text
    assert "\n  outside what was measured: " in text


def test_an_explanation_says_what_binds_outside_what_was_measured_too():
    said = explanation_text(explain(build(LLADA, "herald"), H200, BEYOND))
    assert "EXTRAPOLATED, BOUND BY cpu selection" in said.splitlines()[0]


@pytest.mark.parametrize("fast", [False, True])
def test_an_answer_that_grows_past_the_margin_is_outside(fast):
    """2,048 tokens are 6% of 32K; with --fast the few blocks of events see less of it than the margin."""
    assert run("dense", 32768, 38, gen_tokens=2048, fast=fast).status == "EXTRAPOLATED"


@pytest.mark.parametrize(("past", "named"), [(0.99, set()), (1.01, {"gemm_efficiency"})])
def test_the_margin_decides_from_where_on_a_reading_is_outside(past, named):
    """A step of one row of 32 tokens, its draft's with 64, against a curve that ends a little before them."""
    end = 64 / (MARGIN * past)
    outside = set(simulate(build(LLADA, "herald"), ending_at(end), small(1)).to_dict().get("extrapolated", ()))
    assert outside & {"gemm_efficiency"} == named


def test_prefill_and_blocks_are_told_apart_where_they_price_the_same_op():
    """A prompt of one block with its masks is 64 tokens, and so is a step that carries a draft."""
    found = simulate(build(LLADA, "herald"), ending_at(48), small(1)).to_dict()
    assert "gemm_efficiency" in found["extrapolated"]
    assert "gemm_efficiency" in found["prefill_extrapolated"]


def test_prompts_that_are_prefilled_between_blocks_count_for_the_throughput():
    """Two requests one after the other: the second one's prefill is part of what the first block is followed by."""
    profile = ending_at(300)
    one, two = (simulate(build(LLADA, "dense"), profile, small(count, prompt=512)) for count in (1, 2))
    assert "gemm_efficiency" in one.to_dict()["prefill_extrapolated"]
    assert "gemm_efficiency" not in one.to_dict().get("extrapolated", ())
    assert "gemm_efficiency" in two.to_dict()["extrapolated"]


def test_a_run_on_single_numbers_left_nothing():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    result = simulate(build(LLADA, "herald"), profile, Workload.uniform(32768, 80, gen_tokens=128))
    assert result.status == "BOUND BY cpu selection"
    assert not {"extrapolated", "prefill_extrapolated"} & set(result.to_dict())
    assert "outside what was measured" not in result_text(result)


def test_kv_in_8_bits_is_said_to_rest_on_kernels_that_read_16():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    plain = simulate(build(LLADA, "herald"), profile, small(1))
    eight = build(LLADA, "herald", kv_dtype="fp8", dram_kv_dtype="fp8")
    added = set(simulate(eight, profile, small(1)).assumptions) - set(plain.assumptions)
    assert added == {"KV in fp8: kernels keep the profile's efficiencies; none that reads it was measured"}


def ending_at(tokens):
    """The machine with a curve of the products' efficiency from one token to ``tokens``, the same at both."""
    curve = H200.engine.gemm_efficiency
    short = Curve((1.0, float(tokens)), (0.5, 0.5), curve.x_unit, curve.unit, curve.origin)
    return replace(H200, engine=replace(H200.engine, gemm_efficiency=short))


def small(count, prompt=32):
    """``count`` requests of four blocks, one after another in one slot."""
    requests = tuple(RequestSpec(number, prompt, 128) for number in range(count))
    return replace(Workload.uniform(prompt, 1, gen_tokens=128, steps=4), requests=requests)
