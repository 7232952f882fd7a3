"""What launches beside a fetch tell of how much slower they go: spans made by hand, and short runs."""

import pytest
import torch

from calibration.bench import Bench, Part
from calibration.gpu import fetching_steps
from calibration.gpu.fetching_steps import Factors, compared, proxies, steps
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype
from herald_pipeline.trace import Span

US = 1000


def span(stage, start_us, end_us, layer=1):
    return Span(stage, "", "", 1, 0, layer, 1, start_us * US, end_us * US, 0, 0.0, 0.0, 0.0, 0.0, 0, ())


def test_a_launch_beside_another_for_all_its_time_is_as_much_slower_as_it_is_longer():
    found = compared("", [span("a", 0, 100)], [span("a", 0, 160)], [span("b", 0, 500)])
    assert found.longer == pytest.approx(1.6)


def test_what_has_nothing_beside_it_counts_at_full_speed():
    # 40 of 100 alone; the other 60 take 120.
    found = compared("", [span("a", 0, 100)], [span("a", 0, 160)], [span("b", 40, 500)])
    assert found.longer == pytest.approx(2.0)


def test_launches_of_several_kinds_that_follow_one_another_are_beside_it_together():
    others = [span("b", 0, 80), span("c", 80, 120), span("b", 120, 160)]
    assert compared("", [span("a", 0, 100)], [span("a", 0, 160)], others).longer == pytest.approx(1.6)


def test_a_launch_that_hardly_meets_the_other_tells_nothing_and_none_is_faster_for_company():
    assert compared("", [span("a", 0, 100)], [span("a", 0, 160)], [span("b", 120, 500)]).longer == 1.0
    assert compared("", [span("a", 0, 100)], [span("a", 0, 80)], [span("b", 0, 500)]).longer == 1.0


def test_each_kind_is_held_against_what_has_nothing_beside_it():
    together = [
        span("step_layer", 0, 900, 0),  # the first layer: no experts
        span("step_layer", 1000, 1160, 1), span("step_layer", 2000, 2100, 2),
        span("proxy", 0, 400, 0), span("proxy", 1160, 1280, 2),
        span("upload", 1000, 1290, 2),
    ]  # fmt: skip
    apart = [span("proxy", 0, 90, 0), span("proxy", 100, 200, 1)]
    assert steps(together).longer == pytest.approx(1.6)
    assert proxies(together, apart).longer == pytest.approx(1.2)


def test_factors_are_curves_over_what_they_depend_on_with_the_engines_units():
    step, proxy = Factors({512.0: 1.6, 128.0: 0.97}, {2e8: 1.7, 1e8: 1.2}).values(0.1, "")
    assert (step.path, step.x, step.y) == ("engine.step_beside_row_fetch", (128.0, 512.0), (1.0, 1.6))
    assert (proxy.path, proxy.x, proxy.y) == ("engine.proxy_beside_row_fetch", (1e8, 2e8), (1.2, 1.7))
    units = {name: spec.unit for name, spec in specs(Engine).items()}
    assert all(value.unit == units[value.path.removeprefix("engine.")] for value in (step, proxy))


def test_short_runs_of_both_methods_give_every_kind_at_every_batch(monkeypatch):
    """Without a GPU by the plain actions, which have the same stages: not for their times."""
    plan = Plan(1, 6, 0, 0.0, 1e6)
    bench = Bench(tiny().shape, torch.device("cpu"), torch.float32, plan, KVDtype.FP32, KVDtype.FP32, (0,), (0,), 8)
    monkeypatch.setattr(fetching_steps, "context", lambda _: 64)
    part = Part("contention")
    fetching_steps.measure(bench, part)
    told = {(row["rows"], row["case"], row["beside"]) for row in part.rows}
    beside = ("", "row fetch")
    assert told == {(rows, f"{kind}, in a run", b) for rows in (1, 2) for kind in ("step", "proxy") for b in beside}
    assert all(row["bytes"] > 0 and row["samples"] > 0 for row in part.rows)
    assert [len(value.x) for value in part.values] == [2, 2]
    assert all(y >= 1 for value in part.values for y in value.y)
