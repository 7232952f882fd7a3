"""A kernel's ceiling states what the host gave beside it: reading its own pool, and arithmetic, before and after."""

import json

import pytest

from benchmarks.gpu import ceilings
from benchmarks.gpu.__main__ import main


@pytest.mark.parametrize(("name", "many_queries"), [("cpu_1q_kernel", False), ("cpu_32q_kernel", True)])
def test_a_kernel_s_ceiling_reads_its_own_pool_before_and_after(monkeypatch, tmp_path, name, many_queries):
    monkeypatch.setenv("HERALD_BENCH_INSIDE", "1")
    monkeypatch.setattr(ceilings, "_LEAST_S", 0.0)
    read = []

    def pool_read(pool, threads):
        read.append(pool.num_slots)
        return 10.0 * len(read)

    monkeypatch.setattr(ceilings.kernels, "pool_read_gb_s", pool_read)
    given = ["--cells", f"ceiling:{name}:256:2", "--device", "cpu", "--model", "demo", "--threads", "1"]
    assert main([*given, "--out", str(tmp_path)]) == 0
    found = json.loads(next(tmp_path.glob("ceiling-*.json")).read_text())["result"]
    # Medians of 10, 20 and 30, and of 40, 50 and 60.
    assert found["host_rates"]["pool_read_gb_s"] == [20.0, 50.0]
    assert read == [2] * 6
    assert found["pool_read_gb_s"] == 50.0
    assert ("many_queries_gb_s" in found["host_rates"]) is many_queries
