"""Host memory measured over places of a large pool, as on a server: here with a small model and few entries."""

import statistics
from collections import namedtuple

import numpy as np
import pytest
import torch

from calibration import conditions, host_pool, parts, profile_file
from calibration.bench import Bench, Part, Value
from calibration.parts import memory
from calibration.running import run_parts
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.model import KVDtype
from herald_pipeline.units import GB

FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)
LAYERS = 7


@pytest.fixture
def bench(monkeypatch):
    """A server's bench without a device: only what the host does is timed."""
    monkeypatch.setattr(host_pool, "grid", lambda _: [(1, 256), (2, 512), (2, 1024), (4, 1024)])
    for part in ("selection", "gather"):
        monkeypatch.setattr(f"calibration.parts.{part}.grid", host_pool.grid)
    monkeypatch.setattr(host_pool, "num_layers", lambda *_, **__: LAYERS)
    said = []
    bench = Bench(
        tiny().shape, torch.device("cuda"), torch.float32, FAST, KVDtype.FP32, KVDtype.FP32, (), (0, 1), block_length=8,
        host_gb=1000.0, say=said.append,
    )  # fmt: skip
    bench.found["machine.dram.capacity_gb"] = 1000.0
    bench.said = said
    yield bench
    host_pool.close(bench)


def test_places_are_at_even_distances_and_reach_from_one_end_to_the_other(bench):
    pool = host_pool.host_pool(bench)
    assert pool.spread(3) == (0, 3, 6)
    assert pool.spread(100) == tuple(range(LAYERS))
    assert pool.place_gb(3) == pytest.approx(3 * pool.kv.nbytes / LAYERS / GB)


@pytest.mark.parametrize(
    ("layer_gb", "host_gb", "most", "expected"),
    [(5.37, 135.1, 20, 18), (10.7, 270.3, 36, 18), (5.37, 1000.0, 20, 20), (5.37, 16.0, 20, 3)],
)
def test_a_pool_takes_three_quarters_of_the_host_up_to_the_model_s_layers_and_three_at_least(
    layer_gb, host_gb, most, expected
):
    assert host_pool.num_layers(layer_gb * GB, host_gb * GB, most) == expected


def test_few_points_ask_for_few_layers():
    assert host_pool.num_layers(1.0 * GB, 1000.0 * GB, 20, quick=True) == 3


def test_a_host_without_room_is_refused_with_what_is_needed_and_free():
    host_pool.check_room(10, 1 * GB, 20 * GB, 17 * GB)
    with pytest.raises(CapacityError, match=r"10 layers of 1\.0 GB .* 16\.5 GB, and 12\.0 GB are free: .*--host-gb"):
        host_pool.check_room(10, 1 * GB, 20 * GB, 12 * GB)


def test_the_room_is_asked_for_before_the_pool_is_made(bench):
    bench.host_gb = 0.001
    with pytest.raises(CapacityError, match="are free"):
        host_pool.host_pool(bench)
    assert bench.host_pool is None


def test_memory_that_ends_while_it_is_written_is_told(bench, monkeypatch):
    left = iter([1e12, 1e12, 1e12, 0.0])
    monkeypatch.setattr(host_pool, "free_bytes", lambda _: next(left))
    with pytest.raises(CapacityError, match="host memory ended at"):
        host_pool.host_pool(bench)
    assert bench.host_pool is None


def test_without_the_host_s_capacity_the_part_that_reads_it_is_named(bench):
    bench.found.clear()
    with pytest.raises(ConfigError, match="'memory' measures"):
        host_pool.host_pool(bench)


def test_all_layers_are_written_with_what_the_first_one_holds(bench):
    pool = host_pool.host_pool(bench)
    pages = pool.kv.pages
    assert 0.9 < float(np.std(pages[0])) < 1.1
    assert all(np.array_equal(pages[0], layer) for layer in pages[1:])
    assert len(pool.written_s) == LAYERS
    assert any(f"in {LAYERS} places, written in" in line for line in bench.said)


def test_the_pool_is_made_once_and_closed_once(bench):
    pool = host_pool.host_pool(bench)
    assert host_pool.host_pool(bench) is pool
    host_pool.close(bench)
    host_pool.close(bench)
    assert bench.host_pool is None
    assert not pool.kv.address


def test_the_read_rate_is_the_median_over_places(bench):
    part = parts.get("dram")(bench)
    (value,) = part.values
    rows = [row for row in part.rows if row.get("case") == "by place"]
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    assert value.y == pytest.approx(statistics.median(row["gb_s"] for row in rows), rel=1e-3)
    assert f"median of {LAYERS} places" in value.note
    assert f"best {max(row['gb_s'] for row in rows):.1f}" in value.note
    first = [row for row in part.rows if row.get("case") == "first write"]
    assert [row["seconds"] for row in first] == bench.host_pool.written_s


def test_each_place_is_scanned_and_read(bench):
    bench.found["machine.dram.read_gb_s"] = parts.get("dram")(bench).values[0].y
    part = parts.get("selection")(bench)
    rows = [row for row in part.rows if row.get("case") == "by place"]
    assert [row["layer"] for row in rows] == list(range(LAYERS))
    assert all(0.01 < row["gb_s"] < 1000 and 0.01 < row["read_gb_s"] < 1000 for row in rows)
    assert {value.path for value in part.values} >= {
        "engine.select_dram_efficiency", "engine.select_flops_efficiency", "engine.select_size_cost",
        "engine.select_keys_dram_efficiency", "engine.select_int8_dram_efficiency",
    }  # fmt: skip


def test_the_profile_states_the_reads_beside_its_selections_by_place(bench):
    bench.found["machine.dram.read_gb_s"] = parts.get("dram")(bench).values[0].y
    part = parts.get("selection")(bench)
    (read,) = (value for value in part.values if value.path == "machine.dram.beside_selections_gb_s")
    rows = [row for row in part.rows if row.get("case") == "by place"]
    assert read.y == pytest.approx([row["read_gb_s"] for row in rows], rel=1e-3)
    size_gb = bench.host_pool.layer_bytes / 1e9
    assert read.x == pytest.approx([(place + 0.5) * size_gb for place in range(LAYERS)], abs=0.01)
    assert (read.unit, read.x_unit) == ("GB/s", "GB")


def test_the_arithmetic_beside_selections_is_the_mean_of_before_and_after(bench, monkeypatch):
    bench.found["machine.dram.read_gb_s"] = parts.get("dram")(bench).values[0].y
    rates = iter([("amx", 20.0), ("amx", 30.0)])
    of_queries = iter([40.0, 44.0])
    monkeypatch.setattr("calibration.parts.selection.kernels.widest_unit_tflop_s", lambda threads: next(rates))
    monkeypatch.setattr("calibration.parts.selection.kernels.many_queries_gb_s", lambda *_: next(of_queries))
    part = parts.get("selection")(bench)
    found = {value.path: value for value in part.values}
    peak, queries = (found[f"machine.cpu.{name}"] for name in ("peak_tflop_s", "many_queries_gb_s"))
    assert (peak.y, peak.unit, queries.y, queries.unit) == (25.0, "TFLOP/s", 42.0, "GB/s")
    assert "2 thread(s), unit amx" in peak.note
    assert [row["tflop_s"] for row in part.rows if row.get("case") == "arithmetic"] == [20.0, 30.0]
    assert [row["gb_s"] for row in part.rows if row.get("case") == "many queries"] == [40.0, 44.0]


def test_rows_by_place_are_no_times_by_threads(bench, tmp_path):
    for name in ("dram", "selection"):
        part = parts.get(name)(bench)
        bench.found.update({value.path: value.y for value in part.values if isinstance(value.y, float)})
        profile_file.write_raw(tmp_path, part)
        by_threads = conditions._by_threads(tmp_path, name)
        assert sorted(by_threads) == [1, 2]
        # Half of the largest selection; of memory, what the rows by threads say.
        rows = [row for row in part.rows if row.get("threads") and row.get("rows") in (None, 2)]
        assert set(by_threads.values()) <= {row["seconds"] for row in rows}


def test_the_pool_is_there_for_the_parts_that_read_host_memory_and_gone_for_the_others(bench, monkeypatch, tmp_path):
    seen = {}

    def get(name):
        def measure(bench):
            if name in host_pool.PARTS:
                host_pool.host_pool(bench)
            seen[name] = bench.host_pool is not None
            return Part(name, [Value("engine.x", "us", 1.0)])

        return measure

    monkeypatch.setattr(parts, "get", get)
    monkeypatch.setattr("calibration.running.reference_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr("calibration.running._settle", lambda _: None)
    run_parts(bench, ["memory", "dram", "gemm", "gather", "load"], [], lambda _: None, lambda: None, tmp_path)
    assert seen == {"memory": False, "dram": True, "gemm": True, "gather": True, "load": False}
    run_parts(bench, ["dram"], [], lambda _: None, lambda: None, tmp_path)
    assert bench.host_pool is None


def test_free_memory_is_of_what_is_stated_less_what_is_in_use(monkeypatch):
    Memory = namedtuple("Memory", "total available")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: Memory(64 * GB, 40 * GB))
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", ())
    assert memory.free_bytes() == 40 * GB
    # A machine whose memory grows shows less than it is stated to have; 24 GB of that are in use.
    assert memory.free_bytes(256.0) == 232 * GB


@pytest.mark.parametrize(("limit", "free_gb"), [("30000000000", 22), ("max", 40)])
def test_a_control_group_s_limit_counts_less_what_it_would_not_give_back(monkeypatch, tmp_path, limit, free_gb):
    Memory = namedtuple("Memory", "total available")
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: Memory(64 * GB, 40 * GB))
    (tmp_path / "memory.max").write_text(f"{limit}\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("10000000000\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text("anon 8000000000\ninactive_file 2000000000\n", encoding="ascii")
    group = (str(tmp_path), "memory.max", "memory.current", "inactive_file")
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", (group,))
    assert memory.free_bytes() == free_gb * GB
