"""A small model in fp32 gives the CPU's tokens on a GPU, whatever is late; failures end the run and free memory."""

import random
import time
from itertools import pairwise

import pytest
import torch

from herald_exec import Options, decode
from herald_exec.models import tiny
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


RUNNABLE = [name for name in methods.names() if is_runnable(name)]
LENGTHS = [83, 40, 21, 5]


def planned(seed=7, block=BLOCK):
    draw = random.Random(seed)
    rows = tuple(tuple(draw.randint(1, block) for _ in range(4)) for _ in range(4))
    return PlannedPolicy(ListedSteps(rows, block), Sampler(mask_token_id=1))


def run(kit, name, device, requests, accepts, budget=0.3, **options):
    model = tiny(block_length=BLOCK, device=device)
    pipeline = kit.describe(name, model.shape, budget=budget)
    return decode(pipeline, model, requests, policy=accepts, options=Options(**options))


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize("check", [False, True])
def test_tokens_are_the_cpus(name, check, kit):
    requests = kit.prompts(LENGTHS, 24)
    cpu = run(kit, name, "cpu", requests, planned(), batch=3)
    gpu = run(kit, name, "cuda", requests, planned(), batch=3, check=check)
    assert gpu.answers == cpu.answers
    assert gpu.commits == cpu.commits
    if name in ("dense", "herald", "mage-cpu"):
        assert gpu.result.extra["device_path"] == ("unfused: check keeps positions on the host" if check else "fused")


@pytest.mark.parametrize("name", ["dense", "herald"])
def test_rows_that_go_on_by_themselves_give_the_cpus_tokens(name, kit):
    requests = kit.prompts(LENGTHS, [24, 7, 16, 30])
    options = {"batch": 2, "policy": BatchPolicy.FIRST_DONE_FIRST_OUT}
    runs = [run(kit, name, device, requests, planned(), **options) for device in ("cpu", "cuda")]
    assert runs[0].answers == runs[1].answers


def test_a_threshold_decides_as_on_the_cpu(kit):
    policy = RulePolicy(acceptance.get("confidence", threshold=0.02), Sampler(mask_token_id=1))
    runs = [run(kit, "herald", device, kit.prompts(LENGTHS, 24), policy, batch=4) for device in ("cpu", "cuda")]
    assert len({len(block) for blocks in runs[0].commits.values() for block in blocks}) > 3
    assert runs[0].commits == runs[1].commits
    assert runs[0].answers == runs[1].answers


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "dense"])
def test_a_budget_of_all_gives_the_tokens_of_dense(name, kit):
    requests = kit.prompts([40, 21, 64], 32)
    runs = [run(kit, method, "cuda", requests, planned(), budget=1.0, batch=3) for method in (name, "dense")]
    assert runs[0].answers == runs[1].answers


def test_delays_anywhere_change_nothing(kit):
    requests = kit.prompts([40, 21], 16)
    expected = run(kit, "herald", "cpu", requests, planned(), batch=2).answers
    for seed in range(100):
        draw = random.Random(seed)

        def late(launch, draw=draw):
            if draw.random() < 0.2:
                time.sleep(draw.random() * 2e-3)

        assert run(kit, "herald", "cuda", requests, planned(), batch=2, before_stage=late).answers == expected, seed


def test_delays_on_the_device_change_nothing(kit):
    """Streams of the device that are late themselves: an edge that only the host's order held would show."""
    requests = kit.prompts([40, 21], 16)
    expected = run(kit, "herald", "cpu", requests, planned(), batch=2).answers
    for seed in range(20):
        draw = random.Random(seed)

        def late(launch, draw=draw):
            if launch.stage.resource != "cpu" and draw.random() < 0.3:
                torch.cuda._sleep(draw.randint(1, 4_000_000))

        assert run(kit, "herald", "cuda", requests, planned(), batch=2, before_stage=late).answers == expected, seed


def test_a_failing_stage_ends_the_run_with_its_own_error(kit):
    def fail(launch):
        if launch.stage.name == "upload" and launch.block == 1:
            raise ValueError("no such luck")

    with pytest.raises(RunError, match="no such luck"):
        run(kit, "herald", "cuda", kit.prompts([40, 21], 32), planned(), batch=2, before_stage=fail)
    torch.cuda.synchronize()


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
