import pytest

from herald_pipeline.steps import parse
from herald_pipeline.workload import RequestSpec, Workload
from herald_sim.fast import evaluate
from herald_sim.simulate import simulate
from herald_sim.uncontended import Uncontended, why_not

UNCONTENDED = ("dense", "mage-offload", "infinigen", "mage-cpu")


@pytest.mark.parametrize("method", UNCONTENDED)
@pytest.mark.parametrize(("steps", "gen_tokens"), [(20, 320), (1, 190), (3, 170)])
def test_fast_equals_events_where_nothing_contends(paper_profile, pipeline_of, method, steps, gen_tokens):
    pipeline = pipeline_of(method, budget=0.05)
    workload = Workload.uniform(16384, 16, gen_tokens=gen_tokens, steps=steps)
    events = simulate(pipeline, paper_profile, workload, beyond_memory=True)
    fast = evaluate(pipeline, paper_profile, workload)
    assert fast.throughput_tok_s == pytest.approx(events.throughput_tok_s, rel=1e-9)
    assert fast.block_time_s == pytest.approx(events.block_time_s, rel=1e-9)
    assert fast.main_time_s == pytest.approx(events.main_time_s, rel=1e-9)
    assert fast.stall_s == pytest.approx(events.stall_s, rel=1e-9, abs=1e-12)
    assert fast.first_block_time_s == pytest.approx(events.first_block_time_s, rel=1e-9)
    assert fast.delivered_tokens == events.delivered_tokens


@pytest.mark.parametrize("method", [*UNCONTENDED, "herald", "shadowkv", "specontext", "cpu-exact"])
@pytest.mark.parametrize(("steps", "gen_tokens"), [(20, 192), (1, 190), (3, 330)])
def test_fast_equals_following_the_launches_one_by_one(paper_profile, pipeline_of, method, steps, gen_tokens):
    pipeline = pipeline_of(method)
    workload = Workload.uniform(16384, 16, gen_tokens=gen_tokens, steps=steps)
    fast = evaluate(pipeline, paper_profile, workload)
    followed = Uncontended(pipeline, workload).throughput_tok_s(paper_profile)
    assert followed == pytest.approx(fast.throughput_tok_s, rel=1e-9)


@pytest.mark.parametrize("model", ["llada2-mini", "sdar-8b"])
def test_fast_is_too_fast_where_streams_contend_and_says_by_how_much(paper_profile, pipeline_of, model):
    pipeline = pipeline_of("herald", model)
    workload = Workload.uniform(32768, 80, gen_tokens=320)
    events = simulate(pipeline, paper_profile, workload, beyond_memory=True)
    fast = simulate(pipeline, paper_profile, workload, beyond_memory=True, fast=True)
    assert 1.0 < fast.throughput_tok_s / events.throughput_tok_s < 1.35
    stated = fast.extra["contention_error"]
    assert stated == pytest.approx(fast.throughput_tok_s / events.throughput_tok_s - 1, abs=0.02)
    assert fast.extra["mode"].startswith("fast")


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Workload.uniform(4096, 4, steps=parse("uniform:2,4")), "different numbers of steps"),
        (Workload.uniform(4096, 4, policy="first-done-first-out"), "one by one"),
        (Workload.uniform([4096, 8192], 4), "requests differ"),
        (Workload.uniform(4096, 4, gen_tokens=96), "fewer than"),
        (Workload((RequestSpec(0, 64, 512, arrival_ns=5),), batch=1), "do not all run"),
    ],
)
def test_what_fast_mode_does_not_cover_falls_back_to_events_and_says_why(paper_profile, pipeline_of, workload, reason):
    pipeline = pipeline_of("dense")
    assert reason in why_not(pipeline, workload)
    result = simulate(pipeline, paper_profile, workload, fast=True)
    assert result.extra["mode"].startswith("events (fast mode:")
    assert result.throughput_tok_s == simulate(pipeline, paper_profile, workload).throughput_tok_s
