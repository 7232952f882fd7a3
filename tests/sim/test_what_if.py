"""What-ifs behave: more of a resource never hurts, more work never takes less, the ring moves with what binds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_pipeline import capacity, catalogue, hardware_io
from herald_pipeline.capacity import Memory
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.ceilings import ceilings
from herald_sim.explain import scaled
from herald_sim.simulate import simulate

PROFILE = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
MODEL = catalogue.get("llada2-mini")
RESOURCES = (
    ("gpu", "bandwidth_gb_s"),
    ("gpu", "peak_tflop_s"),
    ("dram", "read_gb_s"),
    ("cpu", "attention_tflop_s"),
    ("link", "h2d_gb_s"),
    ("link", "d2h_gb_s"),
)
METHODS = ("dense", "mage-offload", "infinigen", "mage-cpu", "mage-cpu-representative", "herald", "herald-no-draft")
_TURNS = 0.01
"""Where kernels take turns, a faster part can shift who waits for whom: a percent, not more."""


def block_time(method, profile, context, batch, steps):
    workload = Workload.uniform(context, batch, gen_tokens=128, steps=steps)
    return simulate(build(MODEL, method), profile, workload, beyond_memory=True, check=True).block_time_s


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.sampled_from(RESOURCES),
    st.floats(1.01, 8.0),
    st.sampled_from([4096, 16384, 32768]),
    st.integers(1, 64),
    st.integers(1, 32),
)
def test_more_of_any_resource_never_hurts(method, resource, factor, context, batch, steps):
    more = scaled(PROFILE, *resource, factor)
    before, after = (block_time(method, profile, context, batch, steps) for profile in (PROFILE, more))
    assert after <= before * (1 + _TURNS)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 40), st.integers(1, 24))
def test_more_work_never_takes_less_time(method, batch, steps):
    base = block_time(method, PROFILE, 16384, batch, steps)
    assert block_time(method, PROFILE, 16384, batch + 8, steps) >= base * (1 - _TURNS)
    assert block_time(method, PROFILE, 32768, batch, steps) >= base * (1 - _TURNS)
    assert block_time(method, PROFILE, 16384, batch, steps + 8) >= base * (1 - _TURNS)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 300), st.sampled_from([4096, 32768, 65536]))
def test_what_fits_still_fits_with_one_request_less(method, batch, context):
    pipeline, memory = build(MODEL, method), Memory.of(PROFILE)
    if batch > 1 and capacity.budget(pipeline, context, batch, memory).fits:
        assert capacity.budget(pipeline, context, batch - 1, memory).fits


def ring(profile, scheme):
    rows = [row for row in ceilings(MODEL, profile, 32768) if row["scheme"] == scheme]
    (binding,) = [row for row in rows if row["binding"]]
    assert binding["value_tok_s"] == min(row["value_tok_s"] for row in rows)
    return binding["name"]


@pytest.mark.parametrize(
    ("scheme", "before", "more", "after"),
    [
        ("full KV fetched each step", "full_kv_fetch_per_step", [("link", "h2d_gb_s")], "gpu_full_kv_forward"),
        ("sparse KV fetched each step", "sparse_fetch_per_step", [("link", "h2d_gb_s")], "gpu_sparse_forward"),
        (
            "CPU selection, one query, once a block",
            "gpu_sparse_forward",
            [("gpu", "bandwidth_gb_s"), ("gpu", "peak_tflop_s")],
            "cpu_1q_kernel",
        ),
    ],
)
def test_removing_what_binds_moves_the_ring(scheme, before, more, after):
    profile = PROFILE
    assert ring(profile, scheme) == before
    for section, name in more:
        profile = scaled(profile, section, name, 1000.0)
    assert ring(profile, scheme) == after


def test_ceilings_state_formula_inputs_and_provenance():
    for row in ceilings(MODEL, PROFILE, 32768):
        assert row["formula"]
        assert row["inputs"]["B"] == 32
        assert set(row["provenance"].values()) <= {"published", "fitted", "datasheet"}


def test_fetch_ceilings_are_one_number_twenty_times_over():
    values = {row["name"]: row["value_tok_s"] for row in ceilings(MODEL, PROFILE, 32768)}
    assert values["sparse_fetch_per_step"] == pytest.approx(20 * values["full_kv_fetch_per_step"])
    assert values["sparse_fetch_per_block"] == pytest.approx(400 * values["full_kv_fetch_per_step"])
