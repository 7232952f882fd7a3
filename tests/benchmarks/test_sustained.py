"""What steps under constant load say: medians, how far they slow down, and the driver's rows."""

import pytest

from benchmarks.gpu.sustained import rows_of, summary


def test_the_slow_down_is_of_the_settled_half_over_the_burst():
    found = summary([10.0] * 8, [10.0] * 50 + [12.0] * 50, [10.5] * 20)
    assert found["slow_down"] == pytest.approx(1.2)
    assert found["slow_down_with_rests"] == pytest.approx(1.05)
    assert found["load_ms_by_tenth"] == [10.0] * 5 + [12.0] * 5


def test_one_step_under_load_is_a_measurement_too():
    assert summary([2.0], [3.0], [2.0])["slow_down"] == pytest.approx(1.5)


def test_lines_of_the_driver_that_were_cut_off_are_left_out():
    rows = rows_of("1980, 3201, 412.5, 41, 0x0\n1755, 3201, 699.1, 55, 0x4\n17")
    assert [row["clocks.sm"] for row in rows] == ["1980", "1755"]
    assert rows[1]["clocks_event_reasons.active"] == "0x4"
