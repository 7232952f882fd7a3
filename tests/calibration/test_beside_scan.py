"""What becomes of the times of gathers and copies beside a scan."""

import pytest

from calibration.beside_scan import appends, batches, values
from calibration.timing import Timing


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
