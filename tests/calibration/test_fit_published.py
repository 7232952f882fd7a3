"""The fit to printed values, on targets that are cheap to predict and whose answer is known."""

import numpy as np
import pytest

from calibration.fit_published import FREE, KERNELS, fit, profile_with, write
from herald_pipeline import hardware_io
from herald_pipeline.hardware import known
from herald_sim.exhibits.targets import HARDWARE, Target

PAPER = hardware_io.resolve(HARDWARE)
# Within the bounds: a share that the profile has at its bound cannot be larger.
TRUE = {
    name: min(known(getattr(PAPER.engine, name)).peak * (1.1 if at % 2 else 0.9), 0.95 * FREE[name][1])
    for at, name in enumerate(FREE)
}


def value_of(profile, name):
    return known(getattr(profile.engine, name)).peak


@pytest.fixture
def products(monkeypatch):
    """Fifteen targets: each number alone, and products of neighbours; all follow from ``TRUE`` exactly."""
    names = list(FREE)
    groups = [(name,) for name in names] + list(zip(names[::2], names[1::2], strict=True))

    def target(group):
        def predict(profile):
            return float(np.prod([value_of(profile, name) for name in group]))

        return Target(" x ".join(group), "none", float(np.prod([TRUE[name] for name in group])), predict)

    found = [target(group) for group in groups]
    monkeypatch.setattr("calibration.fit_published.targets", lambda: found)
    return found


def silent(_):
    return None


def test_values_that_explain_everything_are_found(products):
    found = fit(products, 32, report=silent)
    for name, value in TRUE.items():
        assert found.values[name] == pytest.approx(value, rel=1e-3)
    assert max(map(abs, found.errors.values())) < 1e-3


def test_a_value_left_out_is_predicted_by_the_others(products):
    found = fit(products, 32, left_out=True, report=silent)
    assert set(found.left_out.errors) == {target.key for target in products}
    assert max(map(abs, found.left_out.errors.values())) < 1e-2
    assert "each left out in turn 15" in found.summary()


def test_keeping_the_profiles_values_changes_none(products):
    found = fit(products, 32, keep=True, report=silent)
    for name in FREE:
        assert found.values[name] == pytest.approx(value_of(PAPER, name), rel=1e-6)
    assert found.spreads["layer_overhead_us"] > 0


def test_a_trial_changes_the_engine_alone():
    trial = profile_with({KERNELS: 48, "sampler_passes": 10.0})
    assert value_of(trial, KERNELS) == 48
    assert value_of(trial, "sampler_passes") == 10.0
    assert trial.machine == PAPER.machine


def test_what_is_written_is_what_is_read(products, tmp_path):
    path = tmp_path / "profile.toml"
    path.write_text((hardware_io.profile_dir() / f"{HARDWARE}.toml").read_text())
    write(fit(products, 40, report=silent), path)
    engine = hardware_io.resolve(path).engine
    for name, value in TRUE.items():
        assert known(getattr(engine, name)).peak == pytest.approx(value, rel=2e-3)
    assert known(getattr(engine, KERNELS)).peak == 40
