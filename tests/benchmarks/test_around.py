"""The host's rates right before and after a run."""

import pytest

from benchmarks.gpu.around import around, host_rates
from herald_exec.models import tiny
from herald_pipeline.pipeline import build


def test_both_times_of_each_rate_are_kept():
    before, after = {"dram_read_gb_s": 120.0, "amx_tflop_s": 26.0}, {"dram_read_gb_s": 121.0, "amx_tflop_s": 18.0}
    assert around(before, after) == {
        "host_rates": {"dram_read_gb_s": [120.0, 121.0], "amx_tflop_s": [26.0, 18.0]},
    }


@pytest.mark.parametrize(("method", "named"), [("herald", True), ("mage-cpu", True), ("dense", False)])
def test_rates_are_read_where_the_cpu_selects(method, named):
    found = host_rates(build(tiny().shape, method), threads=1)
    assert bool(found) is named
    assert all(rate > 0 for rate in found.values())
