"""A profile predicted from another machine's efficiencies and datasheets."""

import tomllib

import pytest
import tomli_w

from calibration.transfer import datasheet, judge, transfer
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError, ProfileError

TARGET = "h100-sxm-80g_xeon-8481c"


def number(value, unit):
    return {"value": value, "unit": unit, "provenance": "measured", "command": "c", "date": "2026-01-01"}


@pytest.fixture
def measured(tmp_path):
    """The paper's machine's numbers under the other machine's name: any complete profile serves."""
    data = tomllib.loads((hardware_io.profile_dir() / f"{TARGET}.toml").read_text(encoding="utf-8"))
    engine = {**data["engines"]["sglang-paper"]}
    for path, table in data.pop("fitted").items():
        engine[path.rpartition(".")[2]] = number(table["value"], table["unit"])
    engine |= {"runtime_gb": number(0.8, "GB"), "gather_dram_efficiency": number(0.5, "share")}
    data |= {"name": "h200-141g_emr-16vcpu", "engine": "herald-exec", "engines": {"herald-exec": engine}}
    data["machine"]["gpu"]["bandwidth_gb_s"] = number(4320.0, "GB/s")
    data["machine"]["dram"]["read_gb_s"] = number(130.0, "GB/s")
    data["machine"]["link"] |= {
        "generation": 5,
        "h2d_gb_s": {**number(0, "GB/s"), "x": [1e6, 1e8], "y": [31.5, 56.7], "x_unit": "B"},
        "d2h_gb_s": number(50.4, "GB/s"),
    }
    data["machine"]["link"]["h2d_gb_s"].pop("value")
    path = tmp_path / "measured.toml"
    path.write_text(tomli_w.dumps(data), encoding="utf-8")
    return path


def test_rates_are_the_targets_nominal_ones_times_what_the_measured_machine_reached(measured, tmp_path):
    found = hardware_io.resolve(transfer(measured, TARGET, tmp_path / "t.toml", "a test"))
    assert found.machine.gpu.bandwidth_gb_s.peak == pytest.approx(0.9 * 3350)
    assert found.machine.link.h2d_gb_s.peak == pytest.approx(0.9 * 31.5)
    assert found.machine.link.h2d_gb_s.at(1e6).value == pytest.approx(0.5 * 31.5)


def test_host_memory_is_bound_by_its_nominal_rate_where_many_threads_would_read_more(measured, tmp_path):
    found = hardware_io.resolve(transfer(measured, TARGET, tmp_path / "t.toml", "a test"))
    assert found.machine.dram.read_gb_s.peak == 307.2


def test_efficiencies_are_taken_over_and_say_where_from_and_every_derate_is_shown(measured, tmp_path):
    found = hardware_io.resolve(transfer(measured, TARGET, tmp_path / "t.toml", "a test"))
    before = hardware_io.resolve(measured)
    assert found.engine.attention_efficiency.values == before.engine.attention_efficiency.values
    assert "h200" in found.engine.attention_efficiency.origin.source
    assert any("0.900 of nominal" in note for note in found.notes)
    assert not found.fitted()


def test_a_prediction_is_not_written_twice(measured, tmp_path):
    transfer(measured, TARGET, tmp_path / "t.toml", "a test")
    with pytest.raises(ConfigError, match="made once"):
        transfer(measured, TARGET, tmp_path / "t.toml", "a test")


def test_a_machine_without_datasheet_numbers_is_refused_with_those_that_have_some():
    with pytest.raises(ConfigError, match=TARGET):
        datasheet("b300")


def test_table_ii_and_fig_5_stand_beside_both_profiles(measured, tmp_path, monkeypatch):
    from calibration import transfer as module

    few = tuple(t for t in module.targets() if t.exhibit == "Fig 5")[:2]
    monkeypatch.setattr(module, "targets", lambda: few)
    blind = hardware_io.resolve(transfer(measured, TARGET, tmp_path / "t.toml", "a test"))
    rows = judge(blind)
    assert [row["name"] for row in rows] == [target.key for target in few]
    assert all(abs(row["fitted_error"]) < 0.05 for row in rows)
    assert all(row["blind"] > 0 for row in rows)


def test_a_profile_that_was_fitted_and_not_measured_is_refused(tmp_path):
    fitted = hardware_io.profile_dir() / f"{TARGET}.toml"
    with pytest.raises(ProfileError, match="in place of a measured number"):
        transfer(fitted, TARGET, tmp_path / "out.toml", "c")
