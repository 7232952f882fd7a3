"""Leave-one-out against the closed form of linear least squares and against fits from scratch."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from calibration.leave_one_out import jacobian, leave_one_out

FREE = (np.full(3, -1e9), np.full(3, 1e9))


def silent(_):
    return None


def test_a_linear_models_left_out_residuals_are_those_of_the_hat_matrix():
    generator = np.random.default_rng(1)
    design, seen = generator.normal(size=(9, 3)), generator.normal(size=9)
    x = np.linalg.lstsq(design, seen, rcond=None)[0]
    hat = design @ np.linalg.pinv(design)
    held = leave_one_out(lambda at: design @ at - seen, x, design, FREE, silent)
    expected = (design @ x - seen) / (1 - np.diag(hat))
    assert [one.residual for one in held] == pytest.approx(expected.tolist(), rel=1e-4)


def test_a_curved_models_fits_agree_with_fits_from_scratch():
    generator = np.random.default_rng(2)
    at, noise = np.linspace(0.2, 3.0, 12), generator.normal(scale=0.02, size=12)
    seen = 2.0 * np.exp(-0.7 * at) + 0.3 + noise

    def residuals(x):
        return (x[0] * np.exp(-x[1] * at) + x[2] - seen) / 0.02

    full = least_squares(residuals, [1.0, 1.0, 0.0], xtol=1e-12).x
    held = leave_one_out(residuals, full, jacobian(residuals, full, 1e-4), FREE, silent)
    for one in held:
        rest = np.arange(12) != one.observation
        alone = least_squares(lambda x, rest=rest: residuals(x)[rest], full, xtol=1e-12).x
        assert one.residual == pytest.approx(residuals(alone)[one.observation], abs=0.25)


def test_a_bound_holds_in_every_fit():
    design, seen = np.eye(3)[[0, 1, 2, 0, 1, 2]], np.array([1.0, 2.0, 3.0, 5.0, 2.0, 3.0])
    bounds = (np.zeros(3), np.array([2.0, 9.0, 9.0]))
    held = leave_one_out(lambda x: design @ x - seen, np.array([2.0, 2.0, 3.0]), design, bounds, silent)
    assert all((one.x <= bounds[1]).all() for one in held)
    assert held[0].residual == pytest.approx(1.0)
