"""Conditions of a run as changes of the prediction."""

from dataclasses import replace

import pytest

from calibration import conditions
from calibration.points import Point
from calibration.reconcile import predictor
from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import Curve

HARDWARE = "h100-sxm-80g_xeon-8481c"


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "selection.csv").write_text(
        "rows,context,queries,threads,seconds\n80,32768,1,15,0.05\n80,32768,1,1,0.4\n80,32768,1,4,0.1\n"
        "1,1024,1,15,0.001\n",
        encoding="utf-8",
    )
    (tmp_path / "dram.csv").write_text("threads,seconds\n1,0.3\n4,0.08\n15,0.04\n", encoding="utf-8")
    return tmp_path


def test_fewer_threads_take_as_much_longer_as_the_raw_tables_say(raw):
    assert conditions.slow_down(raw, 4) == {"selection": pytest.approx(2.0), "dram": pytest.approx(2.0)}


def test_arithmetic_of_many_queries_scales_with_threads_and_one_query_as_the_raw_tables_say(raw):
    profile = hardware_io.resolve(HARDWARE)
    shares = Curve((1.0, 32.0), (0.6, 0.9), "queries", "share", profile.machine.dram.read_gb_s.origin)
    profile = replace(profile, engine=replace(profile.engine, select_flops_efficiency=shares))
    met = conditions.under(profile, (("threads", 4),), raw)
    assert met.engine.select_flops_efficiency.y == (pytest.approx(0.6 / 2.0), pytest.approx(0.9 * 4 / 15))


def test_more_threads_than_the_profile_was_measured_with_are_no_faster(raw):
    assert conditions.share_of_threads(raw, 16) == 1.0


def test_threads_without_raw_tables_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="no times by threads"):
        conditions.slow_down(tmp_path, 4)


def test_a_paced_link_is_as_fast_as_its_pace_and_a_pace_above_the_link_changes_nothing():
    profile = hardware_io.resolve(HARDWARE)
    slow = conditions.under(profile, (("link", 10.0),), None)
    assert slow.machine.link.h2d_gb_s.peak == 10.0
    assert conditions.under(profile, (("link", 1000.0),), None).machine == profile.machine


@pytest.mark.parametrize(("pace", "expected"), [(13.84, 1.0), (20.76, 1.05), (1000.0, 1.4)])
def test_a_paced_copy_is_slower_beside_a_scan_only_by_what_memory_takes_beyond_the_pace(pace, expected):
    # Alone at 27.68 GB/s, beside a scan 1.4 times as long: at half that pace no longer, at three quarters 1.05 times.
    profile = hardware_io.resolve(HARDWARE, None, ["engine.copy_beside_scan=1.4"])
    paced = conditions.under(profile, (("link", pace),), None)
    assert paced.engine.copy_beside_scan.peak == pytest.approx(expected)


@pytest.mark.parametrize("given", [(("lnik", 10.0),), (("keys", "all"),), (("exact", "tpu"),)])
def test_what_nobody_can_predict_is_refused(given):
    with pytest.raises(ConfigError):
        Point("herald", 64, 1, conditions=given)


def test_selecting_by_keys_alone_is_predicted_faster_where_selection_binds():
    shape, profile = catalogue.resolve("llada2-mini"), hardware_io.resolve(HARDWARE)
    common = {"steps": 8, "kv_dtype": "bf16"}
    plain, keys, int8 = (
        predictor(profile, shape)(Point("herald", 32768, 80, conditions=met, **common))
        for met in ((), (("keys", "only"),), (("keys", "int8"),))
    )
    assert int8.stages["select"] < keys.stages["select"] < 0.7 * plain.stages["select"]
    assert keys.figures["throughput_tok_s"] > plain.figures["throughput_tok_s"]
