"""What becomes of the times of gathers and copies beside a scan."""

import time
from types import SimpleNamespace

import pytest

from calibration.beside_scan import appends, batches, behind, values
from calibration.timing import Plan, Timing


def timing(seconds):
    return Timing("", (seconds,) * 4, 0)


def test_batches_reach_from_a_few_requests_to_the_whole_batch():
    assert batches(80) == (2, 16, 40, 80)
    assert batches(3) == (1, 3)


def test_a_kind_has_a_curve_over_its_bytes():
    (found,) = values({"gather": {4e8: 1.7, 1e8: 3.3}}, 0.1)
    assert (found.path, found.unit) == ("engine.gather_beside_scan", "x")
    assert (found.x, found.y) == ((1e8, 4e8), (3.3, 1.7))


def test_an_append_that_is_not_slower_beside_a_scan_has_a_factor_of_one():
    found = appends({1e6: timing(0.002), 2e7: timing(0.007)}, [(2e7, timing(0.028)), (1e6, timing(0.0019))])
    assert found.path == "engine.down_beside_scan"
    assert found.y == (1.0, pytest.approx(4.0))


@pytest.mark.parametrize("beside", [False, True])
def test_a_gather_begins_where_a_selection_ends_and_runs_beside_the_next_one_or_alone(beside):
    spans = {"select": [], "gather": []}

    def work(name, seconds):
        def run():
            begun = time.perf_counter()
            time.sleep(seconds)
            spans[name].append((begun, time.perf_counter()))

        return run

    bench = SimpleNamespace(retrieval_cores=(), plan=Plan(repeats=6, warmup=1))
    found = behind(bench, work("gather", 0.02), work("select", 0.03), beside=beside)
    assert (len(found.samples), found.warmup) == (6, 1)
    assert min(found.samples) >= 0.02
    for (_, ended), (begun, done), (next_begun, _) in zip(
        spans["select"], spans["gather"], spans["select"][1:], strict=False
    ):
        assert begun >= ended
        assert (next_begun < done) is beside
