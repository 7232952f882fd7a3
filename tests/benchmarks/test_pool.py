"""The cell that reads a pool layer by layer."""

from types import SimpleNamespace

import pytest

from benchmarks.gpu.cells import parse
from benchmarks.gpu.pool import pool, smaps
from herald_exec.kernels import PagedKV
from herald_pipeline import catalogue


def test_every_layer_has_a_rate_and_they_make_the_whole_pools():
    bench = SimpleNamespace(shape=catalogue.get("tiny"), kv_dtype="fp32", threads=lambda _: 1, blocks=lambda _: 2)
    found = pool(bench, parse("pool:512:2"))
    shape = bench.shape
    assert sorted(found["layer_gb_s"]) == list(range(shape.num_layers))
    assert min(found["layer_gb_s"].values()) <= found["gb_s"] <= max(found["layer_gb_s"].values())
    # Pages are whole, so a little more than the entries themselves.
    entries = (512 + 2 * shape.block_length) * 2 * shape.num_layers
    assert found["pool_gb"] == pytest.approx(entries * shape.num_kv_heads * shape.head_dim * 2 * 4 / 1e9, rel=0.15)


def test_the_mapping_that_holds_an_address_is_found():
    kv = PagedKV(1, 1, 2, 1024, 64, "fp32")
    try:
        kv.fill_normal(0, 1)
        mapped = smaps(kv.address)
        if mapped:
            assert mapped["Rss"] >= kv.nbytes // 1024
            assert 0 <= mapped["AnonHugePages"] <= mapped["Rss"]
        assert smaps(1) == {}
    finally:
        kv.close()
