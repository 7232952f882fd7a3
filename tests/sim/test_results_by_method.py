"""Which stages of a method count as forwards and which as retrieval."""

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate


def result(method):
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    pipeline = build(catalogue.get("llada2-mini"), method)
    return simulate(pipeline, profile, Workload.uniform(4096, 2, gen_tokens=96, steps=4))


def test_exact_attention_on_the_cpu_is_the_forward_itself_and_no_retrieval():
    """Nothing is selected, so every stage but the copy of clean KV is a part of a forward, and they fill the block."""
    found = result("cpu-exact")
    assert found.retrieval_time_s == 0.0
    assert found.main_time_s == pytest.approx(found.block_time_s - found.stall_s, rel=1e-6)


@pytest.mark.parametrize("method", ["herald", "mage-cpu", "infinigen"])
def test_methods_that_select_have_a_retrieval(method):
    assert result(method).retrieval_time_s > 0
