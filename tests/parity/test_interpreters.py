"""The two interpreters follow one program: same launches in the same order, same bytes, same counts."""

from dataclasses import replace

import pytest
import torch

from herald_exec import DecodeRequest, Options, decode
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_pipeline import hardware_io, methods
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.pipeline import build
from herald_pipeline.result import Recorder
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.stages import OpKind, Rows, Section, launch_shape
from herald_pipeline.steps import DrawnSteps, FixedSteps, ListedSteps
from herald_pipeline.workload import RequestSpec, Workload
from herald_sim.cost import CostModel
from herald_sim.runner import Simulation
from herald_sim.simulate import simulate as simulate_workload

BLOCK = 8
RUNNABLE = [name for name in methods.names() if not methods.get(name).simulated_only]
PLANS = {
    "fixed": FixedSteps(3, BLOCK),
    "short": ListedSteps(((1,), (2, 1)), BLOCK),
    "mixed": ListedSteps(((1, 5, 2), (8, 1), (3, 2, 4)), BLOCK),
    "drawn": DrawnSteps("uniform", 1, BLOCK, BLOCK, seed=3),
}
COPIES = {"fetch", "upload", "gather", "select", "draft_down", "append", "offload"}


@pytest.fixture(scope="module")
def model():
    return tiny(block_length=BLOCK, eos_token_ids=())


@pytest.fixture(scope="module")
def profile():
    return hardware_io.resolve("h100-sxm-80g_xeon-8481c")


def describe(name, model, change=lambda template: template, **settings):
    method = methods.get(name)
    defaults = method.defaults.replace(queries=min(BLOCK, method.defaults.queries))
    original = method.build

    def rebuilt(parts):
        template, pools = original(parts)
        return change(template), pools

    method = replace(method, defaults=defaults, build=rebuilt)
    return build(
        model.shape, method, block_length=BLOCK, kv_dtype="fp32", dram_kv_dtype="fp32", **{"budget": 0.3, **settings}
    )


def requests(lengths, new_tokens):
    generator = torch.Generator().manual_seed(1)
    return [
        DecodeRequest(i, tuple(torch.randint(2, 500, (n,), generator=generator).tolist()), new)
        for i, (n, new) in enumerate(zip(lengths, new_tokens, strict=True))
    ]


def simulate(pipeline, profile, wanted, plan, options):
    program = Program(
        pipeline,
        [request.blocked(BLOCK) for request in wanted],
        slots=options.batch,
        policy=options.policy,
        kv_tokens=options.kv_tokens,
    )
    recorder = Recorder("simulated", keep_trace=True, policy=options.policy)
    last = {r.id: r.end % BLOCK for r in wanted if r.end % BLOCK}
    tails = {r.id: len(r.prompt) % BLOCK for r in wanted}
    costs = CostModel(pipeline, profile)
    Simulation(program, costs, plan, recorder, last_tokens=last, prompt_tails=tails).run()
    result = recorder.result(
        batch=options.batch,
        budget=pipeline.settings.budget,
        finished=len(program.admission.finished),
        rejected=program.admission.rejected,
    )
    return result, recorder.trace


def both(pipeline, model, profile, wanted, plan, policy=BatchPolicy.LOCKSTEP, **options):
    options = Options(batch=3, policy=policy, keep_trace=True, **options)
    decoding = PlannedPolicy(plan, Sampler(mask_token_id=1), order="scripted")
    run = decode(pipeline, model, wanted, policy=decoding, options=options)
    return (run.result, run.trace), simulate(pipeline, profile, wanted, plan, options)


def by_stream(trace):
    """Per stream, in the order in which they ran: what each launch was and what it waited for."""
    streams = {}
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, span.launch)):
        what = (span.launch, span.stage, span.layer, span.block, span.step, span.rows, span.after, span.expected_bytes)
        streams.setdefault(span.stream, []).append(what)
    return streams


def copied(trace):
    return {span.launch: (span.stage, span.bytes) for span in trace.spans if span.stage in COPIES}


COUNTS = (
    "blocks",
    "delivered_tokens",
    "forwards",
    "forwards_per_block",
    "tokens_per_forward",
    "finished",
    "rejected",
    "batch",
    "budget",
)


def assert_alike(real, simulated):
    (real_result, real_trace), (sim_result, sim_trace) = real, simulated
    assert by_stream(real_trace) == by_stream(sim_trace)
    assert copied(real_trace) == copied(sim_trace)
    for name in COUNTS:
        assert getattr(real_result, name) == getattr(sim_result, name), name
    # Whether other streams end before the figures' window begins is a matter of speed; all that they did is above.
    main = {span.stage for span in sim_trace.spans if span.stream == "main" and span.block >= 0}
    counted = [
        {name: sums["count"] for name, sums in result.stages.items() if name in main}
        for result in (real_result, sim_result)
    ]
    assert counted[0] == counted[1] != {}


@pytest.mark.parametrize("policy", list(BatchPolicy))
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("name", RUNNABLE)
def test_launches_bytes_and_counts_are_the_same(model, profile, name, plan, policy):
    """Four requests in three slots, unequal lengths; the last block of one is cut."""
    wanted = requests([16, 64, 40, 24], [16, 21, 8, 24])
    assert_alike(*both(describe(name, model), model, profile, wanted, PLANS[plan], policy))


@pytest.mark.parametrize("name", RUNNABLE)
def test_counted_bytes_are_the_descriptions(model, profile, name):
    """What the executor's copies and kernels counted, launch by launch, against the demand of the stage."""
    (_, trace), _ = both(describe(name, model), model, profile, requests([64, 40], [16, 24]), PLANS["mixed"])
    compared = [span for span in trace.spans if span.stage in COPIES]
    assert all(span.bytes == span.expected_bytes for span in compared)
    assert sum(span.bytes for span in compared) > 0 or name == "dense"


@pytest.mark.parametrize("keys", ["key-only", "int8"])
@pytest.mark.parametrize("name", ["herald", "mage-cpu"])
def test_both_interpreters_count_the_same_bytes_whatever_selection_reads(model, profile, name, keys):
    pipeline = describe(name, model, keys=keys)
    real, simulated = both(pipeline, model, profile, requests([64, 40], [16, 24]), PLANS["mixed"])
    assert_alike(real, simulated)
    selections = [span for span in real[1].spans if span.stage == "select"]
    assert selections
    assert all(span.bytes == span.expected_bytes for span in selections)


@pytest.mark.parametrize("gather", ["fused", "gpu"])
@pytest.mark.parametrize("name", ["herald", "herald-32q", "mage-cpu"])
def test_launches_and_bytes_are_the_same_whoever_gathers(model, profile, name, gather):
    pipeline = describe(name, model, gather=gather)
    real, simulated = both(pipeline, model, profile, requests([64, 40], [16, 24]), PLANS["mixed"])
    assert_alike(real, simulated)
    moved = [span for span in real[1].spans if span.stage in ("scan", "select", "upload")]
    assert {span.stage for span in moved} >= {"select", "upload"}
    assert all(span.bytes == span.expected_bytes for span in moved)


@pytest.mark.parametrize("name", ["dense", "herald"])
def test_kv_that_a_step_reads_and_writes_is_what_the_description_says(model, profile, name):
    pipeline = describe(name, model)
    seen = {}
    decoding = PlannedPolicy(PLANS["mixed"], Sampler(mask_token_id=1), order="scripted")
    options = Options(batch=2, keep_trace=True, before_stage=lambda launch: seen.setdefault(launch.id, launch))
    run = decode(pipeline, model, requests([64, 40], [16, 24]), policy=decoding, options=options)
    steps = [span for span in run.trace.spans if span.stage == "denoise"]
    for span in steps:
        launch = seen[span.launch]
        shape = launch_shape(launch.groups, BLOCK)
        work = launch.stage.work(shape, None)
        kv = sum(r.count * op.hbm_bytes for r in work for op in r.ops if op.kind is OpKind.ATTENTION)
        assert span.bytes == kv
    assert steps


@pytest.mark.parametrize("policy", list(BatchPolicy))
def test_a_request_too_large_is_rejected_once_by_both(model, profile, policy):
    wanted = requests([16, 200, 40], [16, 16, 8])
    real, simulated = both(describe("herald", model), model, profile, wanted, PLANS["fixed"], policy, kv_tokens=100)
    assert_alike(real, simulated)
    assert list(real[0].rejected) == [1]
    assert real[0].finished == 2


def test_prompts_whose_tail_shares_the_first_block_are_counted_alike(model, profile):
    """A tail of two leaves six positions: enough for three steps; an answer of three ends in that block."""
    wanted = requests([18, 66, 42], [14, 3, 22])
    real, simulated = both(describe("herald", model), model, profile, wanted, PLANS["fixed"])
    assert_alike(real, simulated)
    assert real[0].delivered_tokens == 14 + 3 + 22


@pytest.mark.parametrize("lengths", [[512, 512, 512], [512, 16, 16, 16]])
@pytest.mark.parametrize("name", RUNNABLE)
def test_both_state_the_same_bytes_of_either_memory(profile, name, lengths):
    """Weights of 16 bits, as the simulator takes them to be, are half of the device's at this size.

    The executor's host pools are longer by what its kernels ask for beyond a row's end, and by its buffers.
    """
    half = tiny(block_length=BLOCK, eos_token_ids=(), dtype=torch.bfloat16)
    pipeline = build(half.shape, name, block_length=BLOCK, budget=0.3)
    wanted = requests(lengths, [16] * len(lengths))
    run = decode(pipeline, half, wanted, options=Options(batch=3)).result
    specs = tuple(RequestSpec(request.id, len(request.prompt), request.new_tokens) for request in wanted)
    simulated = simulate_workload(pipeline, profile, Workload(specs, 3, BLOCK, steps=FixedSteps(3, BLOCK)))
    assert run.hbm_bytes == pytest.approx(simulated.hbm_bytes, rel=0.03)
    assert run.dram_bytes == pytest.approx(simulated.dram_bytes, rel=0.2)
    assert ("hbm_bytes_reserved" in run.extra) == ("hbm_bytes_reserved" in simulated.extra) == (len(lengths) > 3)


# A changed description --------------------------------------------------------------------------------------------


def with_barrier(template):
    """One stage more: a second point of no work, behind the swap."""
    tail = template.tail[0].stages
    barrier = replace(tail[-1], name="barrier", rows=Rows.COHORT)
    return replace(template, tail=(Section((*tail, barrier)),))


def without_swap_of(template):
    """One stage less; the edge that ended in it now ends in the next block's first step."""
    tail = tuple(stage for stage in template.tail[0].stages if stage.name != "swap")
    edges = tuple(
        replace(edge, after="denoise", block_offset=1, first_only=True) if edge.after == "swap" else edge
        for edge in template.edges
    )
    return replace(template, tail=(Section(tail),), edges=edges)


def reordered(template):
    """The swap before the append."""
    return replace(template, tail=(Section(tuple(reversed(template.tail[0].stages))),))


@pytest.mark.parametrize("change", [with_barrier, without_swap_of, reordered])
def test_a_stage_added_removed_or_moved_is_followed_by_both(model, profile, change):
    wanted = requests([16, 64, 40], [16, 24, 8])
    pipeline, plain = describe("herald", model, change), describe("herald", model)
    real, simulated = both(pipeline, model, profile, wanted, PLANS["mixed"])
    assert_alike(real, simulated)
    before, _ = both(plain, model, profile, wanted, PLANS["mixed"])
    assert by_stream(real[1]) != by_stream(before[1])
    assert real[0].delivered_tokens == before[0].delivered_tokens
