import json

import pytest

from calibration.points import HELD_OUT
from calibration.reconcile import judged, predictor, reconcile
from calibration.text import report_text
from tests.calibration.conftest import point, sample, training


def predicting(rate, **stages):
    return lambda p: sample(rate, stages=stages, method=p.method, context=p.context, batch=p.batch)


def only(report):
    (found,) = report.points
    return found


def test_an_optimistic_rate_has_a_positive_error(profile, shape):
    report = reconcile([sample(100.0)] * 3, profile, shape, None, predicting(110.0))
    found = only(report).throughput
    assert found.error == pytest.approx(0.10)
    assert (found.measured, found.predicted, found.runs, found.spread) == (100.0, 110.0, 3, 0.0)


def test_a_stage_predicted_too_long_has_a_positive_error(profile, shape):
    runs = [sample(100.0, stages={"denoise": 0.010}, shares={"denoise": 1.0})] * 2
    (stage,) = only(reconcile(runs, profile, shape, None, predicting(100.0, denoise=0.013))).stages
    assert (stage.quantity, stage.error) == ("denoise", pytest.approx(0.3))


def test_the_measured_value_is_the_median_of_the_runs(profile, shape):
    runs = [sample(rate) for rate in (100.0, 104.0, 30.0)]
    assert only(reconcile(runs, profile, shape, None, predicting(100.0))).throughput.measured == 100.0


def test_without_makespan_there_is_no_throughput_block_and_the_json_is_valid(profile, shape):
    report = reconcile([sample(None)], profile, shape, None, predicting(110.0))
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert "throughput_tok_s" not in document["points"][0]["figures"]
    assert any("makespan is 0" in note for note in document["points"][0]["notes"])
    assert "nothing is judged" in report_text(report)


def test_a_single_run_says_that_it_has_no_spread(profile, shape):
    report = reconcile([sample(100.0)], profile, shape, None, predicting(110.0))
    assert only(report).throughput.spread is None
    assert "spread" not in report.to_dict()["points"][0]["figures"]["throughput_tok_s"]
    assert only(report).notes == ("a single run: no spread can be given",)


def test_drift_is_how_much_longer_the_reference_takes_and_corrects_a_rate(profile, shape):
    report = reconcile([sample(100.0, reference_s=0.012)] * 2, profile, shape, 0.010, predicting(120.0))
    assert only(report).drift == pytest.approx(1.2)
    assert only(report).throughput.error == pytest.approx(0.2)
    assert only(report).throughput.corrected_error == pytest.approx(0.0)


def test_without_a_reference_the_report_says_that_drift_is_unknown(profile, shape):
    report = reconcile([sample(100.0)], profile, shape, None, predicting(110.0))
    assert only(report).drift is None
    assert any("drift of the machine is not known" in note for note in report.notes)


def test_stages_that_the_description_lacks_are_named(profile, shape):
    runs = [sample(100.0, stages={"denoise": 0.01, "nap": 0.5})]
    report = reconcile(runs, profile, shape, None, predicting(100.0, denoise=0.01))
    assert "measured, not in the description: nap" in only(report).notes


def test_fitted_points_do_not_count_for_the_verdict(profile, shape):
    runs = [training(100.0, context=256), sample(100.0)]
    report = reconcile(runs, profile, shape, None, lambda p: predicting(200.0 if p.context == 256 else 105.0)(p))
    held = report.summary[HELD_OUT]
    assert (held["of"], held["within_bar"], held["worst_error"]) == (1, 1, pytest.approx(0.05))
    assert judged(report)["throughput"]


def test_an_error_beyond_the_bar_is_reported_and_not_hidden(profile, shape):
    report = reconcile([sample(100.0), sample(100.0, context=4096)], profile, shape, None, predicting(130.0))
    assert not judged(report)["throughput"]
    assert "throughput within 15% on 0 of 2 held-out points (median +30.0%, worst +30.0%)" in report_text(report)


def test_a_stage_kind_without_weight_is_listed_and_not_judged(profile, shape):
    runs = [sample(100.0, stages={"denoise": 0.01, "upload": 1e-5}, shares={"denoise": 0.999, "upload": 0.001})]
    report = reconcile(runs, profile, shape, None, predicting(100.0, denoise=0.01, upload=1.0))
    assert "upload" not in judged(report)
    assert "listed, not judged (below 1% of busy time): upload" in report_text(report)


def test_the_predictor_simulates_the_point(profile, shape):
    found = predictor(profile, shape)(point("herald", 2048, 2))
    assert found.figures["throughput_tok_s"] > 0
    assert {"denoise", "select", "gather", "upload"} <= set(found.stages)
