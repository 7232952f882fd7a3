"""A run that ends early ends with its own error, keeps what it had, and holds nothing (U19, U17)."""

import signal
import threading
import time
from dataclasses import replace

import pytest

from herald_exec import Options, decode
from herald_exec import execution as execution_module
from herald_exec.policy import PlannedPolicy
from herald_exec.pools import Pools
from herald_pipeline.errors import ConfigError, PipelineError, RunError
from herald_pipeline.steps import FixedSteps


@pytest.fixture
def pools(monkeypatch):
    """Every :class:`Pools` that a run makes, to look at afterwards."""
    made = []

    class Seen(Pools):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(execution_module, "Pools", Seen)
    return made


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("herald-")]


def run(kit, model, before, **options):
    pipeline = kit.describe("herald", model.shape, budget=0.2)
    policy = PlannedPolicy(FixedSteps(3, kit.BLOCK))
    return decode(
        pipeline, model, kit.prompts([40, 20], 40), policy=policy, options=Options(2, before_stage=before, **options)
    )


def raise_in(stage, layer, block, problem):
    def before(launch):
        if (launch.stage.name, launch.layer, launch.block) == (stage, layer, block):
            raise problem

    return before


@pytest.mark.timeout(20)
def test_a_failing_selection_names_layer_and_block_and_everything_is_freed(kit, model, pools):
    before = raise_in("select", 1, 2, ValueError("the kernel said no"))
    with pytest.raises(RunError, match="stage 'select', layer 1, block 2: ValueError: the kernel said no") as caught:
        run(kit, model, before)
    assert isinstance(caught.value.__cause__, ValueError)
    assert pools[0].num_bytes == 0
    assert not threads()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "stage", ["prefill", "offload", "denoise", "draft_down", "project", "gather", "upload", "append", "swap"]
)
def test_a_failure_of_any_stage_ends_the_run(kit, model, pools, stage):
    def before(launch):
        if launch.stage.name == stage:
            raise OSError("gone")

    with pytest.raises(RunError, match=f"stage '{stage}'.* OSError: gone"):
        run(kit, model, before)
    assert pools[0].num_bytes == 0
    assert not threads()


@pytest.mark.timeout(20)
def test_what_had_been_decoded_is_kept_and_marked_partial(kit, model):
    with pytest.raises(RunError) as caught:
        run(kit, model, raise_in("select", 1, 2, ValueError("no")))
    partial = caught.value.partial
    assert partial.partial
    assert 0 < partial.delivered_tokens < 80
    assert partial.to_dict()["partial"] is True


@pytest.fixture
def interrupts():
    """Ctrl-C raises, also where the tests run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_run(kit, model, pools):
    def before(launch):
        if launch.stage.name == "select" and launch.block == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as Ctrl-C: a wait for a lock wakes up
            time.sleep(0.05)

    with pytest.raises(RunError, match=r"interrupted after \d+ forwards"):
        run(kit, model, before)
    assert pools[0].num_bytes == 0
    assert not threads()


@pytest.mark.timeout(20)
def test_a_thread_that_is_killed_ends_the_run(kit, model, pools):
    def before(launch):
        if launch.stage.name == "gather" and launch.block == 1:
            raise SystemExit

    with pytest.raises(RunError, match="SystemExit"):
        run(kit, model, before)
    assert pools[0].num_bytes == 0


def test_a_run_that_ends_well_frees_its_pools_too(kit, model, pools):
    assert run(kit, model, None).result.partial is False
    assert pools[0].num_bytes == 0
    assert not threads()


def test_what_does_not_fit_together_is_said_at_once(kit, model):
    pipeline = kit.describe("herald", model.shape)
    with pytest.raises(ConfigError, match="token id 999 is outside the vocabulary of 512"):
        decode(pipeline, model, [type(kit.prompts([1], 1)[0])(0, (999,), 4)])
    with pytest.raises(ConfigError, match="new_tokens must be >= 1"):
        decode(pipeline, model, kit.prompts([4], 0))
    from herald_pipeline.pipeline import build

    with pytest.raises(ConfigError, match=r"kv_dtype is bf16, the model computes torch.float32.*kv_dtype='fp32'"):
        decode(build(model.shape, "dense", block_length=8), model, kit.prompts([4], 4))


def test_an_action_that_nothing_carries_out_is_refused_before_the_run(kit, model):
    from dataclasses import replace

    from herald_pipeline.errors import PipelineError

    pipeline = kit.describe("dense", model.shape)
    stage = replace(pipeline.template.denoise, action="denoize")
    broken = replace(pipeline, template=replace(pipeline.template, denoise=stage))
    with pytest.raises(
        PipelineError, match="action 'denoize', which the executor does not know; did you mean 'denoise'"
    ):
        decode(broken, model, kit.prompts([4], 4))


def test_a_pipeline_with_a_hazard_is_refused_before_anything_is_allocated(kit, model, pools):
    """Without the edge into the swap, a step could read entries that are still on their way."""
    pipeline = kit.describe("herald", model.shape, budget=0.2)
    edges = tuple(edge for edge in pipeline.template.edges if edge.after != "swap")
    hazardous = replace(pipeline, template=replace(pipeline.template, edges=edges))
    with pytest.raises(PipelineError, match="touch pool 'sparse'"):
        decode(hazardous, model, kit.prompts([40], 16))
    assert pools == []


def test_ideal_is_timed_over_synthetic_kv_and_refused_otherwise(kit, model):
    """Its selection is right at no cost: there is nothing to decode a prompt with, and no position to check."""
    pipeline, policy = kit.describe("ideal", model.shape, budget=0.2), PlannedPolicy(FixedSteps(3, kit.BLOCK))
    requests = kit.prompts([40, 20], 40)
    found = decode(pipeline, model, requests, policy=policy, options=Options(2, synthetic_kv=True, ignore_eos=True))
    assert found.result.finished == 2
    assert {len(answer) for answer in found.answers.values()} == {40}
    for options in (Options(2), Options(2, synthetic_kv=True, check=True)):
        with pytest.raises(ConfigError, match=r"ideal can only be simulated \(.*\), or timed over synthetic KV"):
            decode(pipeline, model, requests, policy=policy, options=options)


def test_a_method_that_can_only_be_simulated_is_refused_over_synthetic_kv_too(kit, model):
    pipeline = kit.describe("specontext", model.shape, budget=0.2)
    with pytest.raises(
        ConfigError, match=r"method specontext can only be simulated \(`herald-sim run --method specontext`\)$"
    ):
        decode(pipeline, model, kit.prompts([40], 8), options=Options(1, synthetic_kv=True))
