"""Overlap is a missing edge: it shows in the trace, timing never changes a token, and every edge is needed (U18)."""

import random
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from herald_exec import Options, decode
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_pipeline import catalogue, methods, trace, validate
from herald_pipeline.errors import RunError
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.stages import Edge
from herald_pipeline.steps import FixedSteps, ListedSteps

OFFLOADED = [name for name in methods.names() if name != "dense" and not methods.get(name).simulated_only]


def with_edges(pipeline, edges):
    return replace(pipeline, template=replace(pipeline.template, edges=tuple(edges)))


def overlap_ns(spans, one, other):
    """Time in which a span of stage ``one`` and a span of stage ``other`` run together."""
    pairs = [(a, b) for a in spans if a.stage == one for b in spans if b.stage == other]
    return sum(max(0, min(a.end_ns, b.end_ns) - max(a.start_ns, b.start_ns)) for a, b in pairs)


def test_retrieval_overlaps_main_and_an_added_edge_ends_that(kit, model):
    """Steps of 10 ms hide four selections of 30 ms; one edge puts them behind one another."""
    naps = {"denoise": 0.01, "select": 0.03}

    def slow(launch):
        time.sleep(naps.get(launch.stage.name, 0))

    pipeline = kit.describe("herald", model.shape, budget=0.2)
    serial = with_edges(pipeline, (*pipeline.template.edges, Edge("upload", "denoise")))
    options = Options(keep_trace=True, before_stage=slow)
    runs = [
        decode(p, model, kit.prompts([40], 40), policy=PlannedPolicy(FixedSteps(8, 8)), options=options)
        for p in (pipeline, serial)
    ]
    assert runs[0].answers == runs[1].answers
    together, apart = (overlap_ns(run.trace.spans, "select", "denoise") for run in runs)
    # The last of five blocks has no retrieval; half of the others' 4 x 30 ms is a mild demand on a busy machine.
    assert together > 4 * 60_000_000
    assert apart == 0
    assert runs[1].result.stall_s > runs[0].result.stall_s
    for run in runs:
        trace.validate(run.trace)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", [1, 51, 101, 151])
def test_two_hundred_seeds_of_delays_give_the_same_tokens_and_pools(kit, first):
    """Each launch sleeps a random time first; a slot is used twice, T is mixed."""
    model = tiny(block_length=4, num_layers=3, hidden_size=32, intermediate_size=32, vocab_size=64, eos_token_ids=())
    requests = kit.prompts([9, 5, 6], [4, 6, 4], vocab=64)
    pipeline = kit.describe("herald", model.shape, budget=0.3, exact_layers=1)
    policy = PlannedPolicy(ListedSteps(((1, 3), (2, 1)), 4), order="scripted")

    def run(seed):
        draw = random.Random(seed)

        def delay(_launch):
            if seed > 0:
                time.sleep(draw.choice((0, 0, 0, 1e-4, 3e-4, 1e-3)))

        batch_policy = list(BatchPolicy)[seed % 3]
        options = Options(batch=2, check=True, policy=batch_policy, threads=1, before_stage=delay)
        return decode(pipeline, model, requests, policy=policy, options=options)

    expected = [run(0), run(-2), run(-1)]
    for seed in range(first, first + 50):
        found, wanted = run(seed), expected[seed % 3]
        assert found.answers == wanted.answers, seed
        assert found.checksums == wanted.checksums, seed


def test_in_halves_the_cpu_goes_from_one_retrieval_to_the_next_without_waiting_for_a_draft(kit, model):
    """Steps and selections are slow; what the CPU waits for between two passes in lockstep is the draft's two steps."""
    pipeline, policy = kit.describe("herald", model.shape, budget=0.3), PlannedPolicy(FixedSteps(2, 8))

    def slow(launch):
        time.sleep({"denoise": 0.02, "select": 0.05}.get(launch.stage.name, 0.0))

    rests, answers = {}, {}
    for batch_policy in (BatchPolicy.LOCKSTEP, BatchPolicy.TWO_BATCH_OVERLAP):
        options = Options(batch=4, policy=batch_policy, before_stage=slow, keep_trace=True)
        run = decode(pipeline, model, kit.prompts([24] * 4, 48), policy=policy, options=options)
        selects = sorted((s for s in run.trace.spans if s.stage == "select"), key=lambda span: span.start_ns)
        passes = [(a, b) for a, b in pairwise(selects) if b.layer < a.layer and a.block > 0]
        rests[batch_policy] = median(b.start_ns - a.end_ns for a, b in passes) / 1e6
        answers[batch_policy] = run.answers
    assert rests[BatchPolicy.LOCKSTEP] > 2 * 20
    assert rests[BatchPolicy.TWO_BATCH_OVERLAP] < rests[BatchPolicy.LOCKSTEP] / 2
    assert answers[BatchPolicy.TWO_BATCH_OVERLAP] == answers[BatchPolicy.LOCKSTEP]


@pytest.mark.parametrize("name", ["mage-cpu", "mage-cpu-representative"])
def test_in_halves_one_halfs_selection_runs_beside_the_others_steps(name, kit, model):
    """In lockstep a block's steps wait for its own selection, so that the two never run together."""
    pipeline, policy = kit.describe(name, model.shape, budget=0.3), PlannedPolicy(FixedSteps(4, 8))

    def slow(launch):
        time.sleep({"denoise": 0.01, "select": 0.02}.get(launch.stage.name, 0.0))

    together, answers = {}, {}
    for batch_policy in (BatchPolicy.LOCKSTEP, BatchPolicy.TWO_BATCH_OVERLAP):
        options = Options(batch=4, policy=batch_policy, before_stage=slow, keep_trace=True)
        run = decode(pipeline, model, kit.prompts([24] * 4, 32), policy=policy, options=options)
        together[batch_policy] = overlap_ns(run.trace.spans, "select", "denoise")
        answers[batch_policy] = run.answers
        trace.validate(run.trace)
    assert together[BatchPolicy.LOCKSTEP] == 0
    # Four blocks of two halves, all but the first of which have steps of 40 ms or more beside selections of 80.
    assert together[BatchPolicy.TWO_BATCH_OVERLAP] > 4 * 40_000_000
    assert answers[BatchPolicy.TWO_BATCH_OVERLAP] == answers[BatchPolicy.LOCKSTEP]


@pytest.mark.timeout(200)
def test_a_hundred_seeds_of_delays_give_the_same_tokens_where_halves_select_in_step_0(kit):
    """Each launch sleeps a random time first; a slot is used twice, T is mixed, a half has a row more."""
    model = tiny(block_length=4, num_layers=3, hidden_size=32, intermediate_size=32, vocab_size=64, eos_token_ids=())
    requests = kit.prompts([9, 5, 6, 7], [4, 6, 4, 8], vocab=64)
    pipeline = kit.describe("mage-cpu", model.shape, budget=0.3, exact_layers=1)
    policy = PlannedPolicy(ListedSteps(((1, 3), (2, 1)), 4), order="scripted")

    def run(delay, batch_policy):
        options = Options(batch=3, check=True, policy=batch_policy, threads=1, before_stage=delay)
        return decode(pipeline, model, requests, policy=policy, options=options)

    lockstep = run(None, BatchPolicy.LOCKSTEP)
    expected = run(None, BatchPolicy.TWO_BATCH_OVERLAP)
    assert expected.answers == lockstep.answers
    for seed in range(100):
        draw = random.Random(seed)

        def delay(_launch, draw=draw):
            time.sleep(draw.choice((0, 0, 0, 1e-4, 3e-4, 1e-3)))

        found = run(delay, BatchPolicy.TWO_BATCH_OVERLAP)
        assert found.answers == expected.answers, seed
        assert found.checksums == expected.checksums, seed


@pytest.mark.parametrize("name", OFFLOADED)
def test_every_edge_is_caught_when_it_is_missing_or_reported_as_implied(name):
    """Without it the validator finds two launches that touch one cell in no order; else other edges order them."""
    pipeline = build(catalogue.get("tiny"), name)
    verdicts = [validate.edge_verdict(pipeline, edge) for edge in pipeline.template.edges]
    assert set(verdicts) <= {"caught", "implied"}
    assert verdicts.count("caught") >= len(verdicts) // 2


@pytest.mark.parametrize(("before", "after"), [("draft_down", "project"), ("upload", "swap")])
def test_a_missing_edge_also_shows_in_a_run_that_is_slow_there(kit, model, before, after):
    """The double of U18: the edge is gone and its source sleeps; the checks end the run, or the tokens differ."""

    pipeline = kit.describe("herald", model.shape, budget=0.3)
    policy, requests = PlannedPolicy(FixedSteps(2, 8), order="scripted"), kit.prompts([60], 32)
    good = decode(pipeline, model, requests, policy=policy, options=Options(check=True))

    def late(launch):
        if launch.stage.name == before:
            time.sleep(0.03)

    edges = [edge for edge in pipeline.template.edges if (edge.before, edge.after) != (before, after)]
    assert len(edges) == len(pipeline.template.edges) - 1
    options = Options(check=True, before_stage=late, validated=False)
    try:
        run = decode(with_edges(pipeline, edges), model, requests, policy=policy, options=options)
    except RunError:
        return
    assert (run.answers, run.checksums) != (good.answers, good.checksums)
