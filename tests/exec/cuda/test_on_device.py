"""A small model in fp32 gives the CPU's tokens on a GPU, whatever is late; failures end the run and free memory.

In the order of what they tell: tokens, overlap, delays, errors, then every method. The whole file is meant to take less
than 150 seconds on an H200, most of it Triton's compilation.
"""

import gc
import random
import sys
import time
from itertools import pairwise
from statistics import median

import pytest
import torch

from herald_exec import Options, decode
from herald_exec.models import random_weights, tiny
from herald_exec.models.weights import CPU_SEEDED_PARAMS
from herald_exec.policy import PlannedPolicy, RulePolicy
from herald_exec.session import ACTIONS
from herald_pipeline import methods
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import RunError
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import ListedSteps

pytestmark = pytest.mark.cuda
BLOCK = 8


def is_runnable(name):
    """Whether the executor has an action for every stage of the method."""
    if methods.get(name).simulated_only:
        return False
    return all(stage.action in ACTIONS for stage in build(tiny().shape, name).template.stages())


FUSED = ("dense", "herald", "mage-cpu", "layer-prefetch", "mage-offload", "infinigen", "step-fetch")
# The fused path first: it is what is measured.
RUNNABLE = sorted(filter(is_runnable, methods.names()), key=lambda name: name not in FUSED)
LENGTHS = [83, 40, 21, 5]


def planned(seed=7, block=BLOCK):
    draw = random.Random(seed)
    rows = tuple(tuple(draw.randint(1, block) for _ in range(4)) for _ in range(4))
    return PlannedPolicy(ListedSteps(rows, block), Sampler(mask_token_id=1))


def run(kit, name, device, requests, accepts, budget=0.3, settings=None, **options):
    model = tiny(block_length=BLOCK, device=device)
    pipeline = kit.describe(name, model.shape, budget=budget, **(settings or {}))
    return decode(pipeline, model, requests, policy=accepts, options=Options(**options))


@pytest.mark.parametrize("name", FUSED)
def test_tokens_of_the_fused_path_are_the_cpus(name, kit):
    requests = kit.prompts(LENGTHS, 24)
    cpu, gpu = (run(kit, name, device, requests, planned(), batch=3) for device in ("cpu", "cuda"))
    assert gpu.answers == cpu.answers
    assert gpu.commits == cpu.commits
    assert gpu.result.extra["device_path"] == "fused"


def test_exact_layers_on_the_device_give_the_cpus_tokens(kit):
    requests, settings = kit.prompts(LENGTHS, 24), {"exact_layers": 1, "exact_layers_on": "gpu"}
    runs = [run(kit, "herald", device, requests, planned(), batch=4, settings=settings) for device in ("cpu", "cuda")]
    assert runs[1].result.extra["device_path"] == "fused"
    assert runs[0].answers == runs[1].answers


@pytest.mark.parametrize(("name", "gather"), [("herald", "fused"), ("herald", "gpu"), ("step-fetch", "gpu")])
def test_whoever_gathers_the_tokens_are_the_cpus(name, gather, kit):
    """``gpu``: the device reads the rows out of page-locked host memory."""
    requests, settings = kit.prompts(LENGTHS, 24), {"gather": gather}
    runs = [run(kit, name, device, requests, planned(), batch=3, settings=settings) for device in ("cpu", "cuda")]
    assert runs[1].result.extra["device_path"] == "fused"
    assert runs[0].answers == runs[1].answers


def test_runs_one_after_another_leave_nothing_on_the_device(kit):
    """Not the workspaces that cuBLAS keeps for each run's streams either."""
    held = []
    for _ in range(3):
        run(kit, "herald", "cuda", kit.prompts(LENGTHS, 16), planned(), batch=4)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]


def test_weights_that_are_drawn_on_the_device_take_no_memory_beside_themselves():
    shape = tiny(vocab_size=800_000).shape
    assert shape.num_params > CPU_SEEDED_PARAMS
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = random_weights(shape, "cuda", torch.bfloat16)
    own = sum(tensor.nbytes for _, tensor in weights.tensors())
    assert torch.cuda.max_memory_allocated() - held < 1.02 * own


def test_a_threshold_decides_as_on_the_cpu(kit):
    policy = RulePolicy(acceptance.get("confidence", threshold=0.02), Sampler(mask_token_id=1))
    runs = [run(kit, "herald", device, kit.prompts(LENGTHS, 24), policy, batch=4) for device in ("cpu", "cuda")]
    assert len({len(block) for blocks in runs[0].commits.values() for block in blocks}) > 1
    assert runs[0].commits == runs[1].commits
    assert runs[0].answers == runs[1].answers


@pytest.mark.parametrize("name", ["dense", "herald"])
def test_rows_that_go_on_by_themselves_give_the_cpus_tokens(name, kit):
    requests = kit.prompts(LENGTHS, [24, 7, 16, 30])
    options = {"batch": 2, "policy": BatchPolicy.FIRST_DONE_FIRST_OUT}
    runs = [run(kit, name, device, requests, planned(), **options) for device in ("cpu", "cuda")]
    assert runs[0].answers == runs[1].answers


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("herald", {}),
        ("herald", {"gather": "gpu"}),
        ("herald", {"exact_layers": 1, "exact_layers_on": "gpu"}),
        ("mage-cpu", {}),
        ("mage-cpu", {"gather": "gpu"}),
        ("mage-cpu-representative", {}),
    ],
)
@pytest.mark.parametrize("batch", [3, 4])
def test_halves_that_take_turns_give_the_cpus_tokens_in_lockstep(batch, name, settings, kit):
    requests = kit.prompts(LENGTHS, [24, 7, 16, 30])
    cpu = run(kit, name, "cpu", requests, planned(), batch=batch, settings=settings)
    options = {"batch": batch, "policy": BatchPolicy.TWO_BATCH_OVERLAP, "settings": settings}
    found = run(kit, name, "cuda", requests, planned(), **options)
    assert found.result.extra["device_path"] == "fused"
    assert found.answers == cpu.answers


def test_the_cpu_goes_from_one_halfs_retrieval_to_the_others_while_that_half_waits_for_nothing(kit):
    """Steps and selections are slow: between passes the CPU rests for two steps in lockstep, and hardly in halves."""

    def slow(launch):
        if launch.stage.name == "select":
            time.sleep(0.05)
        if launch.stage.name == "denoise":
            torch.cuda._sleep(20_000_000)

    rests, two_steps = {}, PlannedPolicy(ListedSteps(((2,),), BLOCK), Sampler(mask_token_id=1))
    for policy in (BatchPolicy.LOCKSTEP, BatchPolicy.TWO_BATCH_OVERLAP):
        options = {"batch": 4, "policy": policy, "before_stage": slow, "keep_trace": True}
        found = run(kit, "herald", "cuda", kit.prompts([40] * 4, 48), two_steps, **options)
        spans = sorted((s for s in found.trace.spans if s.stage == "select"), key=lambda s: s.start_ns)
        between = [b.start_ns - a.end_ns for a, b in pairwise(spans) if b.layer < a.layer and a.block > 0]
        rests[policy] = median(between)
    assert rests[BatchPolicy.TWO_BATCH_OVERLAP] < rests[BatchPolicy.LOCKSTEP] / 2


@pytest.mark.parametrize("name", ["mage-cpu", "mage-cpu-representative"])
def test_in_halves_one_halfs_selection_runs_beside_the_others_steps(name, kit):
    """In lockstep a block's steps wait for its own selection, so that the two never run together."""

    def slow(launch):
        if launch.stage.name == "denoise":
            torch.cuda._sleep(20_000_000)

    beside = {}
    for policy in (BatchPolicy.LOCKSTEP, BatchPolicy.TWO_BATCH_OVERLAP):
        options = {"batch": 4, "policy": policy, "before_stage": slow, "keep_trace": True}
        found = run(kit, name, "cuda", kit.prompts([40] * 4, 48), planned(), **options)
        steps = [(s.start_ns, s.end_ns) for s in found.trace.spans if s.stage == "denoise"]
        selections = [(s.start_ns, s.end_ns) for s in found.trace.spans if s.stage in ("project", "select", "finish")]
        beside[policy] = sum(any(a < e and s < b for a, b in steps) for s, e in selections)
    assert beside[BatchPolicy.LOCKSTEP] == 0
    assert beside[BatchPolicy.TWO_BATCH_OVERLAP] > 20


def test_retrieval_runs_beside_denoising_on_the_device(kit):
    """The description has no edge between the two: with a slow main stream their spans overlap in device time."""

    def slow(launch):
        if launch.stage.name == "denoise":
            torch.cuda._sleep(20_000_000)

    found = run(
        kit, "herald", "cuda", kit.prompts([83, 40], 32), planned(), batch=2, before_stage=slow, keep_trace=True
    )
    spans = found.trace.spans
    main = [(s.start_ns, s.end_ns) for s in spans if s.stage == "denoise"]
    beside = [
        s for s in spans if s.stage in ("project", "finish") and any(a < s.end_ns and s.start_ns < b for a, b in main)
    ]
    assert len(beside) > 10
    ordered = sorted(main)
    assert all(first[1] <= second[0] for first, second in pairwise(ordered))


def test_steps_of_a_plan_are_issued_before_the_device_has_done_the_ones_before(kit):
    """A plan predicts outcomes: on a slow device later steps of a block are queued while the first one runs."""

    def slow(launch):
        if launch.stage.name == "denoise":
            torch.cuda._sleep(40_000_000)

    steps = PlannedPolicy(ListedSteps(((6,),), BLOCK), Sampler(mask_token_id=1))
    found = run(kit, "dense", "cuda", kit.prompts([40, 40], 16), steps, batch=2, before_stage=slow, keep_trace=True)
    block = sorted((s for s in found.trace.spans if s.stage == "denoise" and s.block == 1), key=lambda s: s.start_ns)
    assert block[2].queued_ns < block[0].end_ns


def late_on_the_device(seed):
    """Work that makes streams of the device late, by a seed."""
    draw = random.Random(seed)

    def sleep(launch):
        if launch.stage.resource != "cpu" and draw.random() < 0.3:
            torch.cuda._sleep(draw.randint(1, 4_000_000))

    return sleep


def test_delays_on_the_device_change_nothing(kit):
    """Streams of the device that are late themselves: an edge that only the host's order held would show."""
    requests = kit.prompts([40, 21], 16)
    expected = run(kit, "herald", "cpu", requests, planned(), batch=2).answers
    for seed in range(20):
        found = run(kit, "herald", "cuda", requests, planned(), batch=2, before_stage=late_on_the_device(seed))
        assert found.answers == expected, seed


def test_a_failing_stage_ends_the_run_with_its_own_error(kit):
    def fail(launch):
        if launch.stage.name == "upload" and launch.block == 1:
            raise ValueError("no such luck")

    held = sys.getswitchinterval()
    with pytest.raises(RunError, match="no such luck"):
        run(kit, "herald", "cuda", kit.prompts([40, 21], 32), planned(), batch=2, before_stage=fail)
    torch.cuda.synchronize()
    assert sys.getswitchinterval() == held


def test_a_step_in_experts_and_bf16_runs_as_a_graph(kit):
    """bf16 with experts takes the grouped matmuls: the run ends, in a graph, with every block's tokens."""
    from herald_pipeline.model import MoeShape

    moe = MoeShape(
        8, 2, 64, num_shared_experts=1, num_groups=2, groups_per_token=1, first_dense_layers=1, gate="sigmoid"
    )
    model = tiny(block_length=BLOCK, moe=moe, device="cuda", dtype=torch.bfloat16)
    pipeline = build(model.shape, "herald", block_length=BLOCK, budget=0.3)
    found = decode(pipeline, model, kit.prompts([83, 40], 24), policy=planned(), options=Options(batch=2))
    assert found.result.extra["device_path"] == "fused"
    assert [len(answer) for answer in found.answers.values()] == [24, 24]


def test_delays_on_the_device_change_nothing_where_halves_select_in_step_0(kit):
    requests, policy = kit.prompts([40, 21, 9], 16), BatchPolicy.TWO_BATCH_OVERLAP
    expected = run(kit, "mage-cpu", "cpu", requests, planned(), batch=3).answers
    for seed in range(20):
        options = {"batch": 3, "policy": policy, "before_stage": late_on_the_device(seed)}
        assert run(kit, "mage-cpu", "cuda", requests, planned(), **options).answers == expected, seed


@pytest.mark.timeout(200)
def test_delays_anywhere_change_nothing(kit):
    requests = kit.prompts([40, 21], 16)
    expected = run(kit, "herald", "cpu", requests, planned(), batch=2).answers
    for seed in range(100):
        draw = random.Random(seed)

        def late(launch, draw=draw):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 2e-3)

        assert run(kit, "herald", "cuda", requests, planned(), batch=2, before_stage=late).answers == expected, seed


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "dense"])
def test_a_budget_of_all_gives_the_tokens_of_dense(name, kit):
    requests = kit.prompts([40, 21, 64], 32)
    runs = [run(kit, method, "cuda", requests, planned(), budget=1.0, batch=3) for method in (name, "dense")]
    assert runs[0].answers == runs[1].answers


# Fused methods without the check have a test of their own above.
@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name in RUNNABLE for check in (False, True) if check or name not in FUSED]
)
def test_tokens_of_every_method_are_the_cpus(name, check, kit):
    requests = kit.prompts(LENGTHS, 24)
    cpu = run(kit, name, "cpu", requests, planned(), batch=3)
    gpu = run(kit, name, "cuda", requests, planned(), batch=3, check=check)
    assert gpu.answers == cpu.answers
    assert gpu.commits == cpu.commits
    if name in FUSED:
        assert gpu.result.extra["device_path"] == "unfused: check keeps positions on the host"
