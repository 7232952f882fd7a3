"""Facts of the executor's graphs that a profile states."""

import pytest

pytest.importorskip("triton")
from calibration.gpu.launches import padding
from herald_exec.cuda.lanes import bucket


def test_lanes_beyond_those_that_a_step_has_are_stated_for_every_number_of_lanes():
    found = padding()
    at = dict(zip(found.x, found.y, strict=True))
    assert at[13] == pytest.approx(16 / 13, abs=1e-4)
    assert at[8] == 1.0
    assert all(round(n * factor) == bucket(int(n)) for n, factor in at.items())
