"""Ceilings by protocol beside predictions and runs, and the check that nothing passes its bound."""

import csv
import json
from dataclasses import replace
from statistics import median

import pytest

from calibration.ceilings import Protocol, bound_block_s, check, compare, foretold_block_s, measured
from calibration.text import ceilings_text
from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError, ProfileError
from herald_sim.ceilings import ceilings

MINI = catalogue.resolve("llada2-mini")
RATES = {
    "dram_read_gb_s": 130.0, "hbm_copy_gb_s": 4000.0, "hbm_read_gb_s": 4200.0, "h2d_gb_s": 55.0, "d2h_gb_s": 55.0,
    "gemm_tflop_s": 800.0,
}  # fmt: skip
LAYER_BYTES = 4 * 16384 * 2 * 4 * 128 * 2
"""Keys and values of a layer, four requests of 16K: bf16, four KV heads of 128."""


def write(folder, name, result):
    (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps({"cell": name, "result": result}))


@pytest.fixture
def cells(tmp_path):
    write(tmp_path, "rates", RATES)
    block_s = LAYER_BYTES * 20 * 20 / 54e9
    ceiling = {"context": 16384, "batch": 4, "steps": 20, "block_s": block_s}
    write(tmp_path, "ceiling:full_kv_fetch_per_step:16384:4", ceiling)
    return tmp_path


def run(folder, throughput):
    point = {"context": 16384, "batch": 4, "steps": 20, "blocks": 3, "block_length": 32, "kv_dtype": "bf16"}
    figures = {"model": "llada2-mini", "method": "layer-prefetch", "options": {}, "throughput_tok_s": throughput}
    write(folder, "run:layer-prefetch:16384:4", {**point, **figures})


def test_a_bound_of_the_link_is_its_bytes_over_its_rate():
    at = Protocol("full_kv_fetch_per_step", 16384, 4, 20, 0.0, {})
    assert bound_block_s(at, RATES, MINI) == pytest.approx(LAYER_BYTES * 20 * 20 / 55e9)
    paced = Protocol("full_kv_fetch_per_step", 16384, 4, 20, 0.0, {"link": "27.5"})
    assert bound_block_s(paced, RATES, MINI) == pytest.approx(LAYER_BYTES * 20 * 20 / 27.5e9)


def test_a_bound_of_few_requests_counts_no_expert_that_they_could_miss():
    at = Protocol("gpu_full_kv_forward", 16384, 1, 20, 0.0, {})
    # A token passes 1 dense and 19 sparse layers; experts of 3 x 2048 x 512 values, 8 of 256 and a shared one.
    layer = 2048 * 128 * (16 + 2 * 4) + 16 * 128 * 2048
    sparse = 19 * (9 * 3 * 2048 * 512 + 2048 * 256)
    weights = 2 * (20 * layer + 3 * 2048 * 5120 + sparse + 157184 * 2048)
    kv = 20 * 16384 * 2 * 4 * 128 * 2
    assert bound_block_s(at, RATES, MINI) == pytest.approx(20 * (kv + weights) / 4200e9, rel=0.001)


def test_protocol_prediction_and_the_method_stand_side_by_side(cells):
    run(cells, 4.0)
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    (row,) = compare(cells, profile, MINI, lambda _: None)["rows"]
    assert row["foretold_error"] == pytest.approx(27.68 / 54 - 1, abs=0.01)
    assert row["achieved_over_bound"] == pytest.approx(4.0 / (4 * 32 / (LAYER_BYTES * 400 / 55e9)))


def test_what_passes_its_bound_is_an_error(cells):
    run(cells, 150.0)
    found = compare(cells, None, MINI, lambda _: None)
    with pytest.raises(ProfileError, match="layer-prefetch reached 150"):
        check(found)


def test_a_folder_without_ceilings_is_refused(tmp_path):
    write(tmp_path, "rates", RATES)
    with pytest.raises(ConfigError, match="holds no ceiling"):
        measured(tmp_path, "llada2-mini", lambda _: None)


def test_what_a_method_reached_is_also_stated_over_the_protocol(cells):
    run(cells, 4.0)
    (row,) = compare(cells, None, MINI, lambda _: None)["rows"]
    assert row["achieved_over_protocol"] == pytest.approx(4.0 / row["protocol_tok_s"])


def test_the_sparse_forward_is_foretold_as_the_simulators_own_ceiling():
    profile = hardware_io.resolve("h200-141g_emr-16vcpu-3")
    at = Protocol("gpu_sparse_forward", 32768, 80, 20, 0.0, {})
    values = {row["name"]: row["value_tok_s"] for row in ceilings(MINI, profile, 32768, batch=80)}
    assert 80 * 32 / foretold_block_s(at, profile, MINI) == pytest.approx(values["gpu_sparse_forward"])


@pytest.mark.parametrize("text", ["{", '{"cell": "rates", "result": {"h2d_gb_s": 55.0}}', '{"cell": "rates"}'])
def test_rates_that_are_cut_off_or_lack_one_are_refused(cells, text):
    (cells / "rates.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rates\.json is no .*take it away"):
        compare(cells, None, MINI, lambda _: None)


def test_a_kernel_is_hit_by_its_method_whether_the_batch_is_scanned_as_a_whole_or_in_halves(cells):
    kernel = {"context": 16384, "batch": 4, "steps": 20, "block_s": 1.0}
    write(cells, "ceiling:cpu_32q_kernel:16384:4", kernel)
    point = {"context": 16384, "batch": 4, "steps": 20, "blocks": 3, "block_length": 32, "kv_dtype": "bf16"}
    for rate, options in ((64.0, {}), (96.0, {"policy": "two-batch-overlap"}), (99.0, {"keys": "only"})):
        figures = {"model": "llada2-mini", "method": "mage-cpu", "options": options, "throughput_tok_s": rate}
        write(cells, f"run:mage-cpu:16384:4:{len(options)}{rate}", {**point, **figures})
    found = compare(cells, None, MINI, lambda _: None)
    rows = [row for row in found["rows"] if row["name"] == "cpu_32q_kernel"]
    assert [(row.get("policy"), row["achieved_over_protocol"]) for row in rows] == [
        (None, 0.5),
        ("two-batch-overlap", 0.75),
    ]
    assert "mage-cpu x 4, two-batch-overlap" in ceilings_text(found)


def test_a_ceiling_of_another_model_is_left_out(cells):
    (path,) = cells.glob("ceiling*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "sdar-8b"}))
    said = []
    with pytest.raises(ConfigError, match="holds no ceiling of llada2-mini"):
        compare(cells, None, MINI, said.append)
    assert said == ["ceiling:full_kv_fetch_per_step:16384:4: left out, it ran sdar-8b"]


def kernel(folder, gb_s, **more):
    """A ceiling of one query, whose pool read at the means of ``gb_s`` before and after."""
    result = {"context": 32768, "batch": 16, "steps": 20, "block_s": 0.2, **more}
    write(folder, "ceiling:cpu_1q_kernel:32768:16", {**result, "host_rates": {"pool_read_gb_s": gb_s}})


def row_of_kernel(folder, profile):
    (row,) = (row for row in compare(folder, profile, MINI, lambda _: None)["rows"] if row["name"] == "cpu_1q_kernel")
    return row


@pytest.mark.parametrize("hardware", ["h200-141g_emr-16vcpu-3", "h200-141g_emr-16vcpu-8"])
def test_a_kernel_s_ceiling_is_foretold_with_the_read_rate_of_its_own_pool(cells, hardware):
    profile = hardware_io.resolve(hardware)
    places = profile.machine.dram.beside_selections_gb_s
    read = median(places.y) if places else profile.machine.dram.read_gb_s.peak
    kernel(cells, [read, read])
    same = row_of_kernel(cells, profile)
    # The faster of both, which the first cells state alone, is not what the kernel read at.
    kernel(cells, [0.7 * read, 0.9 * read], pool_read_gb_s=0.9 * read)
    slower = row_of_kernel(cells, profile)
    assert (same["slower_dram"], slower["slower_dram"]) == (pytest.approx(1.0), pytest.approx(1.25))
    # Beside what is read a query has work of its own.
    assert 0.8 - 1e-9 <= slower["foretold_tok_s"] / same["foretold_tok_s"] <= 0.88
    assert f"its pool read at {0.8 * read:.1f} GB/s, so that it takes 1.25 times" in ceilings_text(
        compare(cells, profile, MINI, print)
    )


def test_a_kernel_s_ceiling_is_foretold_as_the_profile_s_raw_table_has_that_kernel(cells):
    """The executor adds half a millisecond to a launch, which the protocol does not: 5% of this selection."""
    profile = hardware_io.resolve("h200-141g_emr-16vcpu-8")
    with (hardware_io.profile_dir() / "h200-141g_emr-16vcpu-8.raw" / "selection.csv").open() as table:
        (seconds,) = (
            float(row["seconds"])
            for row in csv.DictReader(table)
            if (row["rows"], row["context"], row["queries"], row["threads"]) == ("16", "32768", "1", "15")
        )
    at = Protocol("cpu_1q_kernel", 32768, 16, 20, 0.0, {})
    assert foretold_block_s(at, profile, MINI) == pytest.approx(20 * seconds, rel=0.02)


def without_rates(folder):
    (folder / "rates.json").unlink()
    return compare(folder, hardware_io.resolve("h200-141g_emr-16vcpu-8"), MINI, lambda _: None)


def test_without_a_cell_of_rates_a_ceiling_is_judged_and_what_its_bound_lacks_is_said(cells):
    run(cells, 4.0)
    found = without_rates(cells)
    (row,) = found["rows"]
    assert "bound_tok_s" not in row
    assert row["achieved_over_protocol"] == pytest.approx(4.0 / row["protocol_tok_s"])
    assert "full_kv_fetch_per_step 16384 x 4: no bound without h2d_gb_s, which the cell rates" in ceilings_text(found)
    check(found)


def test_without_a_cell_of_rates_a_kernel_is_bound_by_its_own_pool_and_a_paced_link_by_its_pace(cells):
    kernel(cells, [90.0, 110.0])
    paced = {"context": 16384, "batch": 4, "steps": 20, "block_s": 1.0}
    write(cells, "ceiling:full_kv_fetch_per_step:16384:4:link=27.5", paced)
    bounds = {(row["name"], row["link"]): row.get("bound_tok_s") for row in without_rates(cells)["rows"]}
    block_s = 20 * 16 * 32768 * 2 * 4 * 128 * 2 / 100e9
    assert bounds == {
        ("cpu_1q_kernel", None): pytest.approx(16 * 32 / block_s),
        ("full_kv_fetch_per_step", "27.5"): pytest.approx(4 * 32 / (LAYER_BYTES * 400 / 27.5e9)),
        ("full_kv_fetch_per_step", None): None,
    }


@pytest.mark.parametrize(("name", "scaled"), [("cpu_32q_kernel", True), ("cpu_1q_kernel", False)])
def test_a_ceiling_of_many_queries_is_foretold_with_the_arithmetic_beside_it(cells, name, scaled):
    profile = hardware_io.resolve("h200-141g_emr-16vcpu-3")
    cpu = profile.machine.cpu
    cpu = replace(cpu, peak_tflop_s=replace(cpu.attention_tflop_s, value=20.0))
    profile = replace(profile, machine=replace(profile.machine, cpu=cpu))
    run(cells, 4.0)
    found = {}
    for peak in (20.0, 10.0):
        rates = {"amx_tflop_s": [peak * 1.1, peak * 0.9]}
        ceiling = {"context": 32768, "batch": 16, "steps": 20, "block_s": 0.2, "host_rates": rates}
        write(cells, f"ceiling:{name}:32768:16", ceiling)
        rows = compare(cells, profile, MINI, lambda _: None)["rows"]
        (found[peak],) = (row["foretold_tok_s"] for row in rows if row["name"] == name)
    at = Protocol(name, 32768, 16, 20, 0.0, {})
    assert found[20.0] == pytest.approx(16 * 32 / foretold_block_s(at, profile, MINI))
    # Reading stays as it is: less than twice as long, and most of that, for computing bounds it.
    assert 0.5 < found[10.0] / found[20.0] < 0.75 if scaled else found[10.0] == found[20.0]


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("ceiling:cpu_1q_kernels:64:2", {}, r"unknown ceiling 'cpu_1q_kernels'; did you mean 'cpu_1q_kernel'"),
        ("ceiling:cpu_1q_kernel:64:2:link=fast", {}, "condition link must be a number, got 'fast'"),
        ("ceiling:cpu_1q_kernel:64:2:threads=0", {}, "condition threads must be > 0, got 0"),
        ("ceiling:cpu_1q_kernel:64:2:treads=2", {}, "condition 'treads' is not known; did you mean 'threads'"),
        ("ceiling:cpu_1q_kernel:64:2", {"batch": 0}, "batch must be >= 1, got 0"),
        ("ceiling:cpu_1q_kernel:64:2", {"context": -1}, "context must be >= 1, got -1"),
        ("ceiling:cpu_1q_kernel:64:2", {"block_s": 0.0}, r"block_s must be > 0, got 0\.0"),
    ],
)
def test_a_ceiling_that_cannot_be_is_refused_with_its_file(tmp_path, name, changed, said):
    result = {"context": 64, "batch": 2, "steps": 20, "block_s": 0.2, **changed}
    write(tmp_path, name, result)
    with pytest.raises(ConfigError, match=rf"ceiling-cpu_1q_kernel.*\.json: {said}"):
        measured(tmp_path, MINI.name, lambda _: None)


def test_a_ceiling_beside_arithmetic_of_no_rate_is_refused(cells):
    rates = {"amx_tflop_s": [0.0, 1.0]}
    ceiling = {"context": 32768, "batch": 16, "steps": 20, "block_s": 0.2, "host_rates": rates}
    write(cells, "ceiling:cpu_32q_kernel:32768:16", ceiling)
    with pytest.raises(ConfigError, match="rate of arithmetic"):
        measured(cells, MINI.name, lambda _: None)


def test_a_pool_that_reads_at_no_rate_is_refused(cells):
    ceiling = {"context": 32768, "batch": 16, "steps": 20, "block_s": 0.2, "pool_read_gb_s": 0.0}
    write(cells, "ceiling:cpu_1q_kernel:32768:16", ceiling)
    with pytest.raises(ConfigError, match="pool_read_gb_s"):
        measured(cells, MINI.name, lambda _: None)
