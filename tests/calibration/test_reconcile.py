import json
from dataclasses import replace

import pytest

from calibration.points import HELD_OUT
from calibration.reconcile import Calibration, predictor
from calibration.reconcile import reconcile as reconcile_all
from calibration.report import judged
from calibration.text import report_text
from tests.calibration.conftest import only, point, predicting, reconcile, sample, training


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


def test_drift_is_how_much_longer_the_reference_takes_and_scales_the_prediction(profile, shape):
    report = reconcile([sample(100.0, reference_s=0.012)] * 2, profile, shape, 0.010, predicting(120.0))
    assert only(report).drift == pytest.approx(1.2)
    assert only(report).throughput.plain_error == pytest.approx(0.2)
    assert only(report).throughput.error == pytest.approx(0.0)


def test_a_drift_within_what_the_reference_varies_by_scales_nothing(profile, shape):
    runs = [sample(100.0, reference_s=0.0105)] * 2
    made = reconcile_all(runs, shape, [Calibration(profile, predicting(100.0), 0.010, reference_spread=0.08)])
    assert only(made).drift == pytest.approx(1.05)
    assert only(made).throughput.error == pytest.approx(0.0)


def test_a_machine_that_changed_its_speed_by_a_third_is_not_judged(profile, shape):
    runs = [sample(100.0, reference_s=0.0135)] * 2 + [sample(100.0, context=4096, reference_s=0.010)] * 2
    report = reconcile(runs, profile, shape, 0.010, predicting(110.0))
    assert report.points[0].refused == "the machine ran 1.35 times slower than when it was calibrated: not judged"
    assert (report.summary[HELD_OUT]["of"], report.summary[HELD_OUT]["refused"]) == (1, 1)
    assert "1 of 2 held-out points not judged" in report_text(report)


def test_where_no_point_was_steady_nothing_is_judged(profile, shape):
    report = reconcile([sample(100.0, reference_s=0.020)] * 2, profile, shape, 0.010, predicting(110.0))
    assert not judged(report)["throughput"]
    assert "no held-out point was taken at a steady speed" in report_text(report)


def test_a_run_during_which_the_speed_changed_is_not_counted(profile, shape):
    runs = [sample(100.0), sample(102.0), replace(sample(40.0), unsteady=1.5)]
    found = only(reconcile(runs, profile, shape, None, predicting(101.0)))
    assert (found.throughput.measured, found.throughput.runs) == (101.0, 2)
    assert any("1 of 3 runs not counted" in note for note in found.notes)


def test_with_one_steady_run_left_all_are_counted(profile, shape):
    runs = [sample(100.0), replace(sample(40.0), unsteady=1.5), replace(sample(41.0), unsteady=0.5)]
    assert only(reconcile(runs, profile, shape, None, predicting(101.0))).throughput.runs == 3


def test_two_calibrations_predict_their_mean_and_how_far_they_differ(profile, shape):
    both = [Calibration(profile, predicting(rate), 0.010) for rate in (80.0, 125.0)]
    found = only(reconcile_all([sample(100.0, reference_s=0.010)] * 3, shape, both)).throughput
    assert found.predicted == pytest.approx(100.0)
    # Range of the logarithms over 1.128, the mean range of two values.
    assert found.predicted_spread == pytest.approx(0.4463 / 1.128, abs=1e-3)


def test_each_calibration_is_scaled_from_its_own_speed(profile, shape):
    """The second measurement found the machine twice as slow; runs at the mean speed are predicted alike by both."""
    both = [Calibration(profile, predicting(rate), reference) for rate, reference in ((141.4, 0.010), (70.7, 0.020))]
    found = only(reconcile_all([sample(100.0, reference_s=0.01414)] * 2, shape, both))
    assert found.throughput.predicted == pytest.approx(100.0, rel=1e-3)
    assert found.throughput.predicted_spread == pytest.approx(0.0, abs=1e-3)
    assert not found.refused


def test_the_interval_of_an_error_follows_from_both_sides_spreads(profile, shape):
    both = [Calibration(profile, predicting(rate)) for rate in (95.0, 105.0)]
    found = only(reconcile_all([sample(rate) for rate in (90.0, 100.0, 110.0)], shape, both)).throughput
    # ln(110/90) / 1.693 over three runs, ln(105/95) / 1.128 over two calibrations, two standard deviations.
    assert found.uncertainty == pytest.approx(2 * (0.1185**2 / 3 + 0.0887**2 / 2) ** 0.5, abs=1e-3)


def test_one_calibration_says_that_its_own_spread_is_unknown(profile, shape):
    report = reconcile([sample(100.0, reference_s=0.01)] * 2, profile, shape, 0.01, predicting(100.0))
    assert any("how far a second measurement would predict otherwise is not known" in note for note in report.notes)


def test_without_a_reference_the_report_says_that_drift_is_unknown(profile, shape):
    report = reconcile([sample(100.0)], profile, shape, None, predicting(110.0))
    assert only(report).drift is None
    assert any("drift of the machine is not known" in note for note in report.notes)


def test_runs_without_stages_print_no_table_of_them(profile, shape):
    text = report_text(reconcile([sample(100.0)] * 2, profile, shape, None, predicting(100.0)))
    assert "stage kind, held out" not in text


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
    expected = "throughput within 15% on 0 of 2 held-out points (median +30.0%, mean of sizes 30.0%, worst +30.0%)"
    assert expected in report_text(report)


def test_a_stage_kind_without_weight_is_listed_and_not_judged(profile, shape):
    runs = [sample(100.0, stages={"denoise": 0.01, "upload": 1e-5}, shares={"denoise": 0.999, "upload": 0.001})]
    report = reconcile(runs, profile, shape, None, predicting(100.0, denoise=0.01, upload=1.0))
    assert "upload" not in judged(report)
    assert "listed, not judged (below 1% of busy time): upload" in report_text(report)


def test_the_predictor_simulates_the_point(profile, shape):
    found = predictor(profile, shape)(point("herald", 2048, 2))
    assert found.figures["throughput_tok_s"] > 0
    assert {"denoise", "select", "gather", "upload"} <= set(found.stages)


def test_a_traced_prediction_has_the_median_of_its_launches(profile, shape):
    """HERALD's drafting step forwards 2B positions: the mean of all steps lies above their median."""
    made = point("herald", 4096, 2)
    mean, median = (predictor(profile, shape, traced=traced)(made).stages["denoise"] for traced in (False, True))
    assert 0 < median < mean


def test_a_note_that_many_points_share_is_printed_once(profile, shape):
    runs = [sample(100.0, context=context) for context in (64, 128, 256, 512)]
    text = report_text(reconcile(runs, profile, shape, None, predicting(100.0)))
    assert text.count("a single run") == 1
    assert "note: 4 of 4 points: a single run: no spread can be given" in text


LONG = (("exact", "gpu"), ("gather", "gpu"), ("policy", "two-batch-overlap"), ("threads", 16))


def test_a_point_with_many_conditions_keeps_the_table_narrow(profile, shape):
    runs = [sample(100.0), sample(90.0, method="herald", context=32768, batch=80, conditions=LONG)]
    text = report_text(reconcile(runs, profile, shape, None, predicting(100.0)))
    rows = text[text.index("point ") :].split("\n\n")[0].splitlines()
    assert max(map(len, rows)) < 130
    words = " ".join(row.strip().split("  ")[0] for row in rows)
    assert "herald 32768 x 80, exact gpu, gather gpu, policy two-batch-overlap, threads 16" in words


def test_the_numbers_of_a_point_stand_beside_the_first_line_of_its_name(profile, shape):
    runs = [sample(90.0, method="herald", context=32768, batch=80, conditions=LONG)]
    text = report_text(reconcile(runs, profile, shape, None, predicting(100.0)))
    (numbers,) = [line for line in text.splitlines() if "+11.1%" in line and "90.0" in line]
    assert numbers.startswith("herald 32768 x 80, exact gpu,")
    assert "  threads 16" in text.splitlines()
