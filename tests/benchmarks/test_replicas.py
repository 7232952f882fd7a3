"""Replicas of a run at once: how their rates are put together, who gets which cores, what is refused."""

import argparse
from itertools import pairwise

import pytest

from benchmarks.gpu.__main__ import run_cell
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cells import parse
from benchmarks.gpu.replicas import common_rate, parts_of, summary


def bench(tmp_path, **changes):
    args = {"model": "tiny", "device": "cpu", "threads": None, "out": tmp_path, "hardware": None, "trace": False}
    return Bench(argparse.Namespace(**{**args, "inside": False, "minutes": 1.0, **changes}))


def test_replicas_that_run_at_once_add_up():
    assert common_rate([[0, 1, 2, 3], [0, 1, 2, 3]], 10) == pytest.approx(20)


def test_only_the_span_counts_in_which_all_decode():
    # One block a second each; the second one begins two seconds late, so two seconds are shared.
    assert common_rate([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]], 10) == pytest.approx(20)


def test_a_slower_replica_counts_by_the_share_of_its_block():
    assert common_rate([[0, 1, 2, 3], [0, 4]], 10) == pytest.approx(10 + 2.5)


def test_runs_that_never_overlap_have_no_common_rate():
    assert common_rate([[0, 1, 2], [3, 4, 5]], 10) is None


def test_scaling_is_all_of_them_over_the_one_alone():
    one = {"throughput_tok_s": 8.0, "batch": 2, "block_ends_s": [0, 1, 2]}
    assert summary(one, [one, one], 3)["scaling"] == pytest.approx(2 * 6 / 8)


def test_each_replica_has_neighbouring_cores_of_its_own():
    found = parts_of(range(7), 3)
    assert found == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.timeout(120)
def test_two_replicas_run_on_this_machine_and_their_blocks_end_in_order(tmp_path):
    found = run_cell(bench(tmp_path), parse("replicas:herald:64:2:T=2:blocks=3:threads=1"))
    result = found["result"]
    assert result["replicas"] == 2
    assert len(result["each_tok_s"]) == 2
    for run in (result["alone"], *result["together"]):
        assert len(run["block_ends_s"]) == 3
        assert all(a < b for a, b in pairwise(run["block_ends_s"]))
    assert result["alone"]["block_ends_s"][-1] < result["together"][0]["block_ends_s"][0]


@pytest.mark.timeout(120)
def test_a_replica_that_fails_ends_the_cell_with_its_own_words(tmp_path):
    # A setting that this method has no use for: refused where the run is built, behind the parent's checks.
    found = run_cell(bench(tmp_path), parse("replicas:shadowkv:64:2:T=2:keys=int8"))
    assert "replica 0 ended early" in found["error"]


def test_more_replicas_than_cores_are_refused_before_any_starts(tmp_path):
    found = run_cell(bench(tmp_path), parse("replicas:herald:64:2:gpus=4096"))
    assert "need a core each" in found["error"]


def test_kv_beyond_host_memory_is_refused_before_any_starts(tmp_path):
    found = run_cell(bench(tmp_path, model="sdar-8b"), parse("replicas:herald:32768:1000"))
    assert "do not fit" in found["error"]
