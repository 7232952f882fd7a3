"""What a selection loses to what runs beside it, from the times of both."""

import pytest

from calibration.parts.contention import losses
from calibration.timing import Timing


def timing(seconds):
    return Timing("", (seconds,) * 4, 0)


def test_a_selection_that_stands_while_a_gather_runs_loses_the_gather_s_time():
    # Half as fast beside gathers of 20 ms each: 10 ms a gather, whose bytes take 5 at the read rate.
    pairs = {
        ("selection", "gather"): timing(0.100),
        ("gather", "selection"): timing(0.020),
        ("selection", "copies"): timing(0.050),
        ("copies", "selection"): timing(0.008),
    }
    copy, gather = losses(0.050, pairs, {"gather": 0.005, "copies": 0.002})
    assert (copy.path, gather.path) == ("engine.copy_beside_cost", "engine.gather_beside_cost")
    assert gather.y == pytest.approx(2.0)
    # Nothing lost to copies: a positive number all the same, as profiles ask for.
    assert 0 < copy.y <= 0.01
