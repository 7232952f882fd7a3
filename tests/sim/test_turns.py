"""What a retrieval stream's kernels wait for, and what of its stages holds a forward up."""

import pytest

from herald_pipeline.stages import LaunchShape, OpKind
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel
from herald_sim.phases import Kernels
from herald_sim.simulate import simulate

SHAPE = LaunchShape(4, 128, 64, 4 * 32768, 4 * 1638, 0, 128 * 32768, 128 * 1638)
BLOCK_US, KERNELS = 5.0, 16
TURNS = ("engine.block_us=5.0", "engine.retrieval_kernels_per_layer=16")


def stage_of(pipeline, name):
    return next(stage for stage in pipeline.template.stages() if stage.name == name)


def launch(pipeline, profile, name):
    """Cost of a stage's launch in layer 5, or in all layers."""
    stage = stage_of(pipeline, name)
    return CostModel(pipeline, profile).stage_cost(stage, SHAPE, 5 if stage.layers else None)


def wait_ns(pipeline, profile):
    """What another stream's kernel waits for beside a denoise step."""
    (kernels,) = [phase for phase in launch(pipeline, profile, "denoise").phases if isinstance(phase, Kernels)]
    return kernels.wait_ns


def means(pipeline, profile, *, batch=80, steps=32):
    """Mean nanoseconds of each stage's launches where forwards outlast the retrieval, so that it never runs alone."""
    workload = Workload.uniform(4096, batch, gen_tokens=256, steps=steps)
    stages = simulate(pipeline, profile, workload, beyond_memory=True).stages
    return {name: 1e9 * found["busy_s"] / found["count"] for name, found in stages.items()}


def test_a_kernel_waits_for_a_thread_block_and_not_for_the_kernel_that_it_belongs_to(changed_profile, pipeline_of):
    herald = pipeline_of("herald")
    # Of this engine's kernels the shortest takes 7 us: its layers' fixed 137.2 us alone are spread over 20 of them.
    assert wait_ns(herald, changed_profile(TURNS[0])) == pytest.approx(1000 * BLOCK_US, rel=1e-9)
    assert wait_ns(herald, changed_profile()) > 7000


def test_no_kernel_is_waited_for_longer_than_it_takes(changed_profile, pipeline_of):
    herald = pipeline_of("herald")
    assert wait_ns(herald, changed_profile("engine.block_us=1e6")) == wait_ns(herald, changed_profile())


def test_a_wait_that_was_timed_beside_a_step_is_taken_alone(changed_profile, pipeline_of):
    herald, share = pipeline_of("herald"), "engine.turn_wait_share=0.25"
    expected = pytest.approx(0.25 * wait_ns(herald, changed_profile()), rel=1e-9)
    assert wait_ns(herald, changed_profile(share)) == expected
    assert wait_ns(herald, changed_profile(share, TURNS[0])) == expected


@pytest.mark.parametrize("name", ["project", "finish"])
def test_beside_forwards_each_of_a_stage_s_kernels_waits_for_one_block(name, changed_profile, pipeline_of):
    herald = pipeline_of("herald")
    none, some = (changed_profile(f"engine.block_us={us}", TURNS[1]) for us in (0.0, BLOCK_US))
    # A stage has half of a layer's kernels.
    expected = KERNELS / 2 * BLOCK_US * 1000
    assert means(herald, some)[name] - means(herald, none)[name] == pytest.approx(expected, rel=0.02)


def test_a_stage_s_own_fixed_cost_leaves_the_device_to_the_forward(changed_profile, pipeline_of):
    herald = pipeline_of("herald")
    short, long = (changed_profile(*TURNS, f"engine.retrieval_layer_overhead_us={us}") for us in (100.0, 900.0))
    before, after = means(herald, short), means(herald, long)
    assert after["project"] - before["project"] == pytest.approx(0.5 * 800e3, rel=0.01)
    assert after["denoise"] == pytest.approx(before["denoise"], rel=1e-4)


@pytest.mark.parametrize("method", ["herald", "mage-cpu-representative", "mage-cpu"])
def test_a_pass_has_the_same_fixed_cost_in_either_stream(method, changed_profile, pipeline_of):
    pipeline, cost = pipeline_of(method), "engine.retrieval_layer_overhead_us"
    short, long = (changed_profile(f"{cost}={us}", "engine.retrieval_project_share=0.3") for us in (100.0, 300.0))
    for name, share in (("project", 0.3), ("finish", 0.7)):
        added = launch(pipeline, long, name).total_ns - launch(pipeline, short, name).total_ns
        assert added == pytest.approx(share * 200e3, abs=2)


# Launches that wait for nothing but the device -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "name"),
    [
        ("dense", {}, "denoise"),
        ("step-fetch", {"gather": "gpu"}, "proxy"),
        ("infinigen", {}, "fetch"),
        ("infinigen", {}, "select_step"),
    ],
)
def test_the_host_s_time_for_a_launch_that_it_issues_ahead_is_in_no_stage(
    method, settings, name, changed_profile, pipeline_of
):
    pipeline, cost = pipeline_of(method, **settings), "engine.stage_overhead_us"
    none, some = (launch(pipeline, changed_profile(f"{cost}={us}"), name).total_ns for us in (0.0, 40.0))
    assert none == some


@pytest.mark.parametrize(("method", "name"), [("herald", "select"), ("mage-cpu", "project"), ("herald", "append")])
def test_a_launch_that_waits_for_the_host_takes_the_host_s_time(method, name, changed_profile, pipeline_of):
    pipeline, cost = pipeline_of(method), "engine.stage_overhead_us"
    none, some = (launch(pipeline, changed_profile(f"{cost}={us}"), name).total_ns for us in (0.0, 40.0))
    assert some - none == pytest.approx(40e3, abs=2)


def test_a_step_of_masks_alone_has_its_share_of_the_experts_time(changed_profile, pipeline_of):
    infinigen, share = pipeline_of("infinigen"), "engine.first_step_experts_share"
    one, half = (changed_profile(f"{share}={value}") for value in (1.0, 0.5))
    (experts,) = (op for op in stage_of(infinigen, "select_step").work(SHAPE, 5)[0].ops if op.kind is OpKind.EXPERTS)
    alone = CostModel(infinigen, one)._gpu_ns(experts)
    shorter = launch(infinigen, one, "select_step").total_ns - launch(infinigen, half, "select_step").total_ns
    assert shorter == pytest.approx(alone / 2, abs=2)
    assert launch(infinigen, one, "denoise").total_ns == launch(infinigen, half, "denoise").total_ns


@pytest.mark.parametrize(("method", "name"), [("infinigen", "decide"), ("dense", "denoise")])
def test_a_launch_that_decides_has_the_acceptance_behind_its_head(method, name, changed_profile, pipeline_of):
    pipeline = pipeline_of(method)
    none, some = (changed_profile(*some) for some in ((), ("engine.acceptance_us=200",)))
    added = launch(pipeline, some, name).total_ns - launch(pipeline, none, name).total_ns
    assert added == pytest.approx(200e3, abs=2)
    if method == "infinigen":
        assert launch(pipeline, some, "proxy").total_ns == launch(pipeline, none, "proxy").total_ns
