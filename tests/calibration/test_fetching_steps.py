"""What launches beside a fetch tell of how much slower they go: spans made by hand, and short runs."""

from dataclasses import replace

import pytest
import torch

from calibration.bench import Bench, Part
from calibration.gpu import fetching_steps
from calibration.gpu.fetching_steps import Factors, compared, fetches, proxies, steps
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline import catalogue
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype
from herald_pipeline.trace import Span

US = 1000


def span(stage, start_us, end_us, layer=2, step=0):
    return Span(stage, "", "", 1, step, layer, 1, start_us * US, end_us * US, 0, 0.0, 0.0, 0.0, 0.0, 0, ())


def longer(beside, others):
    """Against a launch of 100 us alone."""
    return compared("", [span("a", 0, 100)], beside, others, ("b", "c")).longer


def test_a_launch_beside_another_for_all_its_time_is_as_much_slower_as_it_is_longer():
    assert longer([span("a", 0, 160)], [span("b", 0, 500)]) == pytest.approx(1.6)


def test_what_has_nothing_beside_it_counts_at_full_speed():
    # 40 of 100 alone; the other 60 take 120.
    assert longer([span("a", 0, 160)], [span("b", 40, 500)]) == pytest.approx(2.0)


def test_launches_of_several_kinds_that_follow_one_another_are_beside_it_together():
    others = [span("b", 0, 80), span("c", 80, 120), span("b", 120, 160)]
    assert longer([span("a", 0, 160)], others) == pytest.approx(1.6)


def test_a_launch_that_hardly_meets_the_other_tells_nothing_and_none_is_faster_for_company():
    assert longer([span("a", 0, 160)], [span("b", 120, 500)]) == 1.0
    assert longer([span("a", 0, 80)], [span("b", 0, 500)]) == 1.0


def test_launches_of_a_step_that_find_the_device_free_and_those_that_do_not_count_by_their_mean():
    assert longer([span("a", 0, 110), span("a", 200, 370)], [span("b", 0, 500)]) == pytest.approx(1.4)


def test_a_step_during_which_something_else_disturbed_does_not_decide():
    steady = [span("a", 0, 120, step=step) for step in range(4)]
    others = [span("b", 0, 2000, step=step) for step in range(5)]
    assert longer([*steady, span("a", 0, 900, step=4)], others) == pytest.approx(1.2)


def test_what_another_step_had_beside_it_is_not_counted():
    assert longer([span("a", 0, 160, step=0)], [span("b", 0, 500, step=1)]) == 1.0


def test_each_kind_is_held_against_what_has_nothing_beside_it():
    together = [
        span("step_layer", 0, 900, 0), span("step_layer", 900, 950, 1),  # the begin of a step
        span("step_layer", 1000, 1160, 2), span("step_layer", 2000, 2100, 3),
        span("proxy", 0, 400, 1), span("proxy", 1160, 1280, 2), span("proxy", 1300, 1400, 3),
        span("upload", 300, 900, 1), span("upload", 1000, 1290, 2), span("upload", 1300, 1900, 3),
    ]  # fmt: skip
    apart = [span("proxy", 0, 90, 0), span("proxy", 100, 200, 1), span("fetch", 0, 900, 0), span("fetch", 0, 200, 1)]
    assert steps(together).longer == pytest.approx(1.6)
    assert proxies(together, apart).longer == pytest.approx(1.2)
    # Of 290 us 10 have nothing beside them: the other 190 of 200 take 280.
    assert fetches(together, apart).longer == pytest.approx(280 / 190)


def test_factors_are_curves_over_what_they_depend_on_with_the_engines_units():
    found = Factors({512.0: 1.6, 128.0: 0.97}, {2e8: 1.7, 1e8: 1.2}, {5e7: 1.2}).values(0.1, 10)
    step, proxy, fetch = found
    assert (step.path, step.x, step.y) == ("engine.step_beside_row_fetch", (128.0, 512.0), (1.0, 1.6))
    assert (proxy.path, proxy.x, proxy.y) == ("engine.proxy_beside_row_fetch", (1e8, 2e8), (1.2, 1.7))
    assert (fetch.path, fetch.x, fetch.y) == ("engine.row_fetch_beside_step", (5e7,), (1.2,))
    units = {name: spec.unit for name, spec in specs(Engine).items()}
    assert all(value.unit == units[value.path.removeprefix("engine.")] for value in found)


def bench_of(shape):
    plan = Plan(1, 6, 0, 0.0, 1e6)
    return Bench(shape, torch.device("cpu"), torch.float32, plan, KVDtype.FP32, KVDtype.FP32, (0,), (0,), 8)


@pytest.mark.parametrize(("rows", "expected"), [(4, 10), (16, 10), (24, 6), (38, 6)])
def test_a_decode_has_more_layers_where_these_hold_less_host_memory_and_whole_rounds_of_the_ring(rows, expected):
    bench = replace(bench_of(catalogue.resolve("llada2-mini")), kv_dtype=KVDtype.BF16)
    assert fetching_steps.layers(bench, rows, 32768) == expected


def test_no_decode_has_more_layers_than_the_model():
    assert fetching_steps.layers(bench_of(replace(tiny().shape, num_layers=5)), 1, 64) == 4


def test_the_first_layers_of_a_model_share_its_weights():
    model = tiny()
    few = fetching_steps.first_layers(model, 2)
    assert (few.shape.num_layers, few.weights.layers[1]) == (2, model.weights.layers[1])
    assert (few.weights.embedding is model.weights.embedding, model.shape.num_layers) == (True, 4)


def test_short_runs_of_both_methods_give_every_kind_at_every_batch(monkeypatch):
    """Without a GPU by the plain actions, which have the same stages: not for their times."""
    monkeypatch.setattr(fetching_steps, "context", lambda _: 64)
    part = Part("contention")
    fetching_steps.measure(bench_of(tiny().shape), part)
    told = {(row["rows"], row["case"], row["beside"]) for row in part.rows if "beside" in row}
    pairs = (("step", "row fetch"), ("proxy", "row fetch"), ("row_fetch", "step and proxy"))
    assert told == {
        (rows, f"{kind}, in a run", beside) for rows in (1, 2) for kind, other in pairs for beside in ("", other)
    }
    order = [row["case"] for row in part.rows if "beside" not in row]
    assert order == [f"row_fetch, in a run: begins behind {what}" for what in ("the step", "its issue")] * 2
    assert all(row["samples"] > 0 for row in part.rows)
    assert [len(value.x) for value in part.values] == [2, 2, 2]
    assert all(y >= 1 for value in part.values for y in value.y)
