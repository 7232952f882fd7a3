"""The host's rates right before and after a run."""

import pytest

from benchmarks.gpu import around as module
from benchmarks.gpu.around import around, host_rates, pool_layers
from herald_exec import kernels
from herald_exec.kernels import bandwidth, kept
from herald_exec.models import tiny
from herald_pipeline.errors import ConfigError
from herald_pipeline.pipeline import build


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch):
    monkeypatch.setattr(module, "_READ_BYTES", 1 << 24)
    monkeypatch.setattr(module, "_QUERIES_S", 0.0)
    monkeypatch.setattr(bandwidth, "_TOKENS", 256)


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


def test_a_rate_that_could_only_be_read_afterwards_stands_alone():
    found = around({"dram_read_gb_s": 120.0}, {"dram_read_gb_s": 121.0, "pool_read_gb_s": 99.0})
    assert found == {"host_rates": {"dram_read_gb_s": [120.0, 121.0], "pool_read_gb_s": [99.0]}}


def test_a_pool_s_rate_is_that_of_reading_its_layers_one_after_another():
    found = host_rates(build(tiny().shape, "herald"), threads=1, layers=[100.0, 50.0])
    assert found["pool_read_gb_s"] == pytest.approx(2 / (1 / 100 + 1 / 50))


def test_the_layers_of_a_pool_are_read_where_a_sweep_keeps_its_memory(monkeypatch):
    monkeypatch.setattr(kept, "LEAST_BYTES", 1 << 20)
    pipeline = build(tiny().shape, "herald")
    layers = pipeline.model.num_layers
    assert pool_layers(pipeline, 1 << 20, threads=1) == []
    with kept.keep_memory():
        pool = kernels.PagedKV(layers, 4, 2, 4096, 64)
        pool.fill_normal()
        num_bytes = pool.nbytes
        pool.close()
        rates = pool_layers(pipeline, num_bytes, threads=1)
        assert len(rates) == layers
        assert all(0.1 < rate < 1000 for rate in rates)
        # A pool that is not there whole is not read; where no CPU selects, none is.
        assert pool_layers(pipeline, 2 * num_bytes, threads=1) == []
        assert pool_layers(build(tiny().shape, "dense"), num_bytes, threads=1) == []


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"fma": 2000.0}, ("fma", 2.0)),
        ({"fma": 2000.0, "bf16_dot": 1200.0}, ("bf16_dot", 1.2)),
        ({"fma": 2000.0, "bf16_dot": 1200.0, "amx": 26000.0}, ("amx", 26.0)),
        ({}, None),
    ],
)
def test_the_fastest_arithmetic_is_the_widest_unit_that_the_kernels_have(monkeypatch, rates, expected):
    monkeypatch.setattr(bandwidth, "peak_gflops", lambda unit, threads: rates.get(unit))
    assert kernels.widest_unit_tflop_s(1) == expected


def test_arithmetic_is_named_by_its_unit():
    (name,) = module.arithmetic(tiny().shape, queries=1, threads=1)
    assert name in ("amx_tflop_s", "bf16_dot_tflop_s", "fma_tflop_s")


def test_beside_a_run_of_many_queries_as_many_are_timed():
    one, many = (host_rates(build(tiny().shape, method), threads=1) for method in ("herald", "mage-cpu"))
    assert set(many) - set(one) == {"many_queries_gb_s"}


def test_the_work_of_more_queries_allows_a_lower_rate():
    few, many = (kernels.many_queries_gb_s(8, 2, 64, queries, threads=1, seconds=0.02) for queries in (2, 32))
    assert 0 < many < few


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_reference_of_no_time_is_refused(seconds):
    with pytest.raises(ConfigError, match="seconds must be"):
        kernels.many_queries_gb_s(8, 2, 64, 32, threads=1, seconds=seconds)
