import pytest

from calibration.parts.attention import joined


def test_neighbours_of_nearly_the_same_bytes_become_their_geometric_mean():
    x, y = joined({100.0: 0.2, 1000.0: 0.4, 1004.0: 0.1, 2000.0: 0.3})
    assert x == pytest.approx((100.0, (1000.0 * 1004.0) ** 0.5, 2000.0))
    assert y == pytest.approx((0.2, 0.2, 0.3))


def test_points_that_lie_apart_stay_as_they_are_in_order():
    assert joined({300.0: 0.3, 100.0: 0.1}) == ((100.0, 300.0), (0.1, 0.3))
