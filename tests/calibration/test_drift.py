"""Rates of the host beside runs: how predictions are made with them, and which runs they keep from being judged."""

import json
import statistics
from dataclasses import replace

import pytest

from calibration.cells import read_cells
from calibration.reconcile import Calibration, predictor
from calibration.reconcile import reconcile as reconcile_all
from calibration.text import report_text
from herald_pipeline import catalogue
from herald_pipeline.hardware import Curve, Number
from tests.calibration.conftest import only, point, predicting, reconcile, sample


def beside(rate, *dram_gb_s):
    """Runs of ``rate``, with host memory's read rate beside each."""
    return [replace(sample(rate), dram_gb_s=gb_s) for gb_s in dram_gb_s]


def test_a_run_is_foretold_with_the_read_rate_that_host_memory_gave_beside_it(profile, shape):
    asked = []

    def predict(p, slower_dram=1.0):
        asked.append(slower_dram)
        return sample(120.0 / slower_dram)

    given = profile.machine.dram.read_gb_s.peak
    report = reconcile(beside(100.0, given / 1.3, given / 1.1), profile, shape, None, predict)
    found = only(report)
    slower = 1 / statistics.fmean((1 / 1.3, 1 / 1.1))
    assert asked == [1.0, pytest.approx(slower)]
    assert found.drift == pytest.approx(slower)
    assert found.throughput.plain_error == pytest.approx(0.2)
    assert found.throughput.error == pytest.approx(1.2 / slower - 1)
    assert report.to_dict()["points"][0]["dram_gb_s"] == pytest.approx(given / slower)


def test_the_read_rate_beside_a_run_is_taken_before_a_reference_and_however_small_its_drift(profile, shape):
    given = profile.machine.dram.read_gb_s.peak
    (run,) = beside(100.0, given / 1.01)
    calibration = Calibration(
        profile, lambda p, slower_dram=1.0: sample(100.0 / slower_dram), 0.010, reference_spread=0.08
    )
    made = only(reconcile_all([replace(run, reference_s=0.020)], shape, [calibration]))
    assert made.drift == pytest.approx(1.01)
    assert made.throughput.error == pytest.approx(1 / 1.01 - 1)


def test_slower_host_memory_lengthens_what_reads_it_and_leaves_the_device_alone(profile):
    predict = predictor(profile, catalogue.get("llada2-mini"))
    plain, slow = (predict(point("herald", 32768, 80), slower) for slower in (1.0, 1.25))
    assert slow.stages["denoise"] == pytest.approx(plain.stages["denoise"], rel=1e-3)
    assert 1.15 < slow.stages["select"] / plain.stages["select"] <= 1.25 + 1e-6


def test_a_run_with_fewer_threads_is_held_against_what_as_many_read_when_it_was_calibrated(profile, shape, tmp_path):
    (tmp_path / "selection.csv").write_text("threads,seconds\n1,0.4\n15,0.05\n", encoding="utf-8")
    (tmp_path / "dram.csv").write_text("threads,seconds\n5,0.08\n15,0.04\n", encoding="utf-8")
    run = replace(sample(100.0, conditions=(("threads", 5),)), dram_gb_s=profile.machine.dram.read_gb_s.peak / 2)
    calibration = Calibration(profile, lambda p, slower_dram=1.0: sample(100.0 / slower_dram), raw=tmp_path)
    made = only(reconcile_all([run], shape, [calibration]))
    assert made.drift == pytest.approx(1.0)
    assert made.throughput.error == pytest.approx(0.0)


@pytest.fixture
def with_peak(profile):
    """A profile whose selections were measured beside arithmetic of 20 TFLOP/s."""
    peak = Number(20.0, "TFLOP/s", profile.machine.dram.read_gb_s.origin)
    cpu = replace(profile.machine.cpu, peak_tflop_s=peak)
    return replace(profile, machine=replace(profile.machine, cpu=cpu))


def run_of(method, peak_tflop_s, profile, **more):
    given = profile.machine.dram.read_gb_s.peak
    return replace(sample(100.0, method=method), dram_gb_s=given, peak_tflop_s=peak_tflop_s, **more)


def by_both(p, slower_dram=1.0, slower_cpu=1.0):
    return sample(100.0 / (slower_dram * slower_cpu))


@pytest.fixture
def with_queries(with_peak):
    """The same, beside selections of many queries whose work allowed 40 GB/s."""
    queries = Number(40.0, "GB/s", with_peak.machine.dram.read_gb_s.origin)
    return replace(
        with_peak, machine=replace(with_peak.machine, cpu=replace(with_peak.machine.cpu, many_queries_gb_s=queries))
    )


def test_a_run_of_many_queries_is_foretold_with_what_their_work_allowed_beside_it(with_queries, shape):
    run = run_of("mage-cpu", 99.0, with_queries, many_queries_gb_s=32.0)
    found = only(reconcile([run], with_queries, shape, None, by_both))
    assert (found.drift, found.cpu_drift) == (pytest.approx(1.0), pytest.approx(1.25))
    assert found.throughput.error == pytest.approx(1 / 1.25 - 1)
    assert found.throughput.plain_error == pytest.approx(0.0)
    assert "1.00 / 1.25" in report_text(reconcile([run], with_queries, shape, None, by_both))


@pytest.mark.parametrize("peak", [18.3, 27.8])
def test_else_with_the_widest_unit_as_far_as_the_kernels_followed_it_on_two_machines(with_peak, shape, peak):
    nanoseconds_a_query = {27.8: 4.8, 18.3: 6.7}
    quiet = Number(27.8, "TFLOP/s", with_peak.machine.dram.read_gb_s.origin)
    given = replace(
        with_peak, machine=replace(with_peak.machine, cpu=replace(with_peak.machine.cpu, peak_tflop_s=quiet))
    )
    found = only(reconcile([run_of("mage-cpu", peak, given)], given, shape, None, by_both))
    assert found.cpu_drift == pytest.approx(nanoseconds_a_query[peak] / nanoseconds_a_query[27.8])


def test_arithmetic_says_nothing_of_a_run_of_one_query_or_with_a_profile_that_does_not_state_it(
    profile, with_peak, shape
):
    for method, given in (("herald", with_peak), ("mage-cpu", profile)):
        run = run_of(method, 5.0, given, unsteady_arithmetic=9.0 if method == "herald" else None)
        found = only(reconcile([run], given, shape, None, by_both))
        assert (found.cpu_drift, found.refused) == (None, "")
        assert found.throughput.error == pytest.approx(0.0)


def test_arithmetic_of_fewer_threads_is_held_against_as_many_of_the_profile_s(with_queries, shape, tmp_path):
    for name in ("selection", "dram"):
        (tmp_path / f"{name}.csv").write_text("threads,seconds\n5,0.08\n15,0.04\n", encoding="utf-8")
    half = with_queries.machine.dram.read_gb_s.peak / 2
    run = sample(100.0, method="mage-cpu", conditions=(("threads", 5),))
    run = replace(run, dram_gb_s=half, many_queries_gb_s=10.0)
    found = only(reconcile_all([run], shape, [Calibration(with_queries, by_both, raw=tmp_path)]))
    assert (found.drift, found.cpu_drift) == (pytest.approx(1.0), pytest.approx(40.0 * 5 / 15 / 10.0))


@pytest.mark.parametrize(("gb_s", "judged"), [(31.0, True), (30.0, False), (51.0, True), (53.0, False)])
def test_arithmetic_that_drifted_by_a_third_ends_judgement_of_many_queries(with_queries, shape, gb_s, judged):
    run = run_of("mage-cpu", None, with_queries, many_queries_gb_s=gb_s)
    found = only(reconcile([run], with_queries, shape, None, by_both))
    assert (found.refused == "") is judged
    assert judged or "the host's arithmetic ran" in found.refused


def test_slower_arithmetic_lengthens_what_selections_compute_and_not_what_they_read(profile):
    predict = predictor(profile, catalogue.get("llada2-mini"))
    plain, slow = (predict(point("mage-cpu", 32768, 16), slower_cpu=slower) for slower in (1.0, 1.25))
    both = predict(point("mage-cpu", 32768, 16), slower_dram=1.25, slower_cpu=1.25)
    assert slow.stages["denoise"] == pytest.approx(plain.stages["denoise"], rel=1e-3)
    assert (
        plain.stages["select"] < slow.stages["select"] < both.stages["select"] <= 1.25 * plain.stages["select"] + 1e-9
    )


@pytest.mark.parametrize(
    ("method", "pool", "peak", "judged"),
    [
        ("herald", 0.5, 0.0, False),
        ("herald", 0.0, 0.5, True),
        ("mage-cpu", 0.5, 0.0, True),
        ("mage-cpu", 0.0, 0.5, False),
    ],
)
def test_a_single_run_during_which_what_bounds_it_changed_speed_is_listed_and_not_judged(
    profile, shape, method, pool, peak, judged
):
    run = replace(sample(100.0, method=method), unsteady=pool, unsteady_arithmetic=peak)
    report = reconcile([run], profile, shape, None, predicting(101.0))
    assert (only(report).refused == "") is judged
    assert judged or "speed changed by more than 30% during it: not judged" in report_text(report)


def over_places(profile, *gb_s):
    """The profile, with what host memory read at beside its selections, by place."""
    places = tuple(float(1 + place) for place in range(len(gb_s)))
    read = Curve(places, gb_s, "GB", "GB/s", profile.machine.dram.read_gb_s.origin)
    dram = replace(profile.machine.dram, beside_selections_gb_s=read)
    return replace(profile, machine=replace(profile.machine, dram=dram))


@pytest.mark.parametrize(("times_as_slow", "judged"), [(1.9, True), (2.0, False), (0.63, True), (0.6, False)])
def test_a_pool_may_lie_in_the_fastest_or_the_slowest_place_of_the_profile_s(profile, shape, times_as_slow, judged):
    # 120 / 80 = 1.5 times as slow and 120 / 150 = 0.8 times, and a drift of 1.3 beyond either.
    (run,) = beside(100.0, 120.0 / times_as_slow)
    places = over_places(profile, 150.0, 120.0, 80.0)
    calibration = Calibration(places, lambda p, slower_dram=1.0: sample(100.0 / slower_dram))
    found = only(reconcile_all([run], shape, [calibration]))
    assert (found.refused == "") is judged
    assert found.throughput.predicted == pytest.approx(100.0 / times_as_slow)


def test_the_rate_that_a_pool_is_held_against_is_that_beside_the_profile_s_selections(profile, shape):
    # The profile's own rate is of another minute: beside its selections memory read at 150 GB/s, the run's pool at 100.
    (run,) = beside(100.0, 100.0)
    places = over_places(profile, 140.0, 150.0, 160.0)
    calibration = Calibration(places, lambda p, slower_dram=1.0: sample(100.0 / slower_dram))
    assert only(reconcile_all([run], shape, [calibration])).drift == pytest.approx(1.5)


def test_a_drift_by_the_reference_knows_no_places(profile, shape):
    calibration = Calibration(over_places(profile, 150.0, 120.0, 80.0), predicting(100.0), 0.010)
    runs = [sample(100.0, reference_s=0.014)] * 2
    assert only(reconcile_all(runs, shape, [calibration])).refused


def test_cells_whose_pool_reads_as_fast_as_the_profile_s_places_are_foretold_as_by_the_profile(profile, tmp_path):
    """From a cell's file to the comparison: the read rate of the run's own pool over the profile's, both ways."""
    read = profile.machine.dram.read_gb_s.peak
    for slower, folder in ((1.0, tmp_path / "same"), (1.25, tmp_path / "slower")):
        folder.mkdir()
        result = {
            "method": "herald", "context": 32768, "batch": 80, "steps": 20, "blocks": 6, "block_length": 32,
            "kv_dtype": "bf16", "model": "llada2-mini", "options": {}, "throughput_tok_s": 2000.0,
            "stages": {"select": {"busy_s": 1.0, "count": 20}, "denoise": {"busy_s": 0.4, "count": 20}},
            "host_rates": {"pool_read_gb_s": [read / slower * 1.02, read / slower * 0.98], "dram_read_gb_s": [1.0]},
        }  # fmt: skip
        cell = {"cell": "run:herald:32768:80", "kind": "run", "what": "herald", "result": result}
        (folder / "run.json").write_text(json.dumps(cell), encoding="utf-8")
    shape = catalogue.get("llada2-mini")
    calibration = Calibration(profile, predictor(profile, shape))
    same, slow = (
        only(reconcile_all(read_cells(tmp_path / name, shape.name, lambda _: None), shape, [calibration]))
        for name in ("same", "slower")
    )
    assert (same.drift, slow.drift) == (pytest.approx(1.0), pytest.approx(1.25))
    assert same.throughput.error == pytest.approx(same.throughput.plain_error)
    select, denoise = (next(s for s in slow.stages if s.quantity == name) for name in ("select", "denoise"))
    assert 1.15 < (1 + select.error) / (1 + select.plain_error) <= 1.25 + 1e-6
    assert denoise.error == pytest.approx(denoise.plain_error, rel=1e-3)
    assert slow.throughput.error < slow.throughput.plain_error
