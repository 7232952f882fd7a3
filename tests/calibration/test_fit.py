"""Fits of runs that come from a profile with known numbers."""

from dataclasses import replace

import pytest

from calibration.fit import fit, fitted_tables
from calibration.reconcile import predictor
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import Curve, Provenance
from tests.calibration.conftest import point, sample, training

CORNERS = ((512, 1), (512, 16), (16384, 1), (16384, 16))


def runs_of(profile, shape, mark=training):
    predict = predictor(profile, shape)
    return [
        mark(predict(point("dense", context, batch)).figures["throughput_tok_s"], context=context, batch=batch)
        for context, batch in CORNERS
    ]


def changed(profile, **factors):
    engine = profile.engine
    for name, factor in factors.items():
        quantity = getattr(engine, name)
        engine = replace(engine, **{name: replace(quantity, value=quantity.value * factor)})
    return replace(profile, engine=engine)


def test_a_number_from_which_the_runs_came_is_found_again(profile, shape):
    truth = changed(profile, layer_overhead_us=1.7)
    found = fit(runs_of(truth, shape), profile, shape, ("layer_overhead_us",))
    (fitted,) = found.parameters
    assert fitted.value == pytest.approx(truth.engine.layer_overhead_us.value, rel=0.01)
    assert fitted.identified
    assert found.residual < 0.01


def test_two_numbers_are_told_apart_where_the_training_set_does(profile, shape):
    truth = changed(profile, layer_overhead_us=0.6, attention_efficiency=0.7)
    found = fit(runs_of(truth, shape), profile, shape, ("layer_overhead_us", "attention_efficiency"))
    values = {fitted.name: fitted.value for fitted in found.parameters}
    assert values["layer_overhead_us"] == pytest.approx(truth.engine.layer_overhead_us.value, rel=0.05)
    assert values["attention_efficiency"] == pytest.approx(truth.engine.attention_efficiency.value, rel=0.05)


def test_a_number_that_the_runs_do_not_depend_on_is_said_to_be_not_identified(profile, shape):
    found = fit(runs_of(profile, shape), profile, shape, ("scattered_copy_efficiency",))
    (fitted,) = found.parameters
    assert not fitted.identified
    assert found.profile.engine.scattered_copy_efficiency == profile.engine.scattered_copy_efficiency
    with pytest.raises(ProfileError, match="no parameter is identified"):
        fitted_tables(found)


def test_a_measured_curve_keeps_its_shape_and_is_scaled(profile, shape):
    value = profile.engine.gemm_efficiency
    curve = Curve((1.0, 64.0, 4096.0), (0.1, 0.3, 0.4), "rows", "share", value.origin)
    start = replace(profile, engine=replace(profile.engine, gemm_efficiency=curve))
    truth = replace(start, engine=replace(start.engine, gemm_efficiency=replace(curve, y=(0.05, 0.15, 0.2))))
    found = fit(runs_of(truth, shape), start, shape, ("gemm_efficiency",))
    if found.parameters[0].identified:
        fitted = found.profile.engine.gemm_efficiency
        assert fitted.y[1] / fitted.y[0] == pytest.approx(3.0)
    else:
        assert found.profile.engine.gemm_efficiency == curve


def test_the_fitted_profile_says_what_pinned_it(profile, shape):
    truth = changed(profile, layer_overhead_us=1.7)
    found = fit(runs_of(truth, shape), profile, shape, ("layer_overhead_us",))
    origin = found.profile.engine.layer_overhead_us.origin
    assert origin.provenance is Provenance.FITTED
    assert "dense 512 x 1" in origin.pinned_by
    tables = fitted_tables(found)
    assert set(tables) == {f"engines.{profile.engine.name}.layer_overhead_us"}


def test_held_out_runs_are_not_looked_at(profile, shape):
    truth = changed(profile, layer_overhead_us=1.7)
    wrong = [sample(1.0, method="herald", context=4096)]
    found = fit(runs_of(truth, shape) + wrong, profile, shape, ("layer_overhead_us",))
    assert found.parameters[0].value == pytest.approx(truth.engine.layer_overhead_us.value, rel=0.01)
    assert len(found.training) == len(CORNERS)


def test_no_training_runs_is_an_error_that_says_how_to_mark_them(profile, shape):
    with pytest.raises(ConfigError, match="mark the lines that a fit may see with set=fit"):
        fit(runs_of(profile, shape, mark=sample), profile, shape)


def test_more_parameters_than_training_points_are_refused(profile, shape):
    names = ("layer_overhead_us", "attention_efficiency")
    with pytest.raises(ConfigError, match=r"1 training point\(s\) for 2 parameter\(s\)"):
        fit([training(100.0)], profile, shape, names)


def test_an_unknown_parameter_is_refused_with_the_closest(profile, shape):
    with pytest.raises(ConfigError, match="unknown engine number 'layer_overhead'; did you mean 'layer_overhead_us'"):
        fit([training(100.0)], profile, shape, ("layer_overhead",))
