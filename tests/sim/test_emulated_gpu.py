"""A machine without a GPU: cores play it, and what retrieval and copies do takes turns on the other cores."""

from dataclasses import replace

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.hardware import Number, Origin, Provenance
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel
from herald_sim.phases import RETRIEVAL_CORES, Flow, Kernels
from herald_sim.resources import fair_speeds
from herald_sim.simulate import simulate

HERE = Origin(Provenance.MEASURED, command="test", date="2026-01-01")


@pytest.fixture(scope="module")
def emulated():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    machine = replace(profile.machine, gpu=replace(profile.machine.gpu, emulated=True))
    return replace(profile, machine=machine)


def with_engine(profile, **numbers):
    quantities = {name: Number(value, unit, HERE) for name, (value, unit) in numbers.items()}
    return replace(profile, engine=replace(profile.engine, **quantities))


def run(profile, **settings):
    workload = Workload.uniform(4096, 4, gen_tokens=128, steps=4)
    return simulate(build(catalogue.get("llada2-mini"), "herald", **settings), profile, workload, check=True)


def mean_s(result, stage):
    return result.stages[stage]["busy_s"] / result.stages[stage]["count"]


def cost_of(profile, stage_name, method="herald"):
    pipeline = build(catalogue.get("llada2-mini"), method)
    costs = CostModel(pipeline, profile)
    workload = Workload.uniform(4096, 4, gen_tokens=128, steps=4)
    from herald_pipeline.scheduling.launches import Feedback
    from herald_pipeline.scheduling.program import Program

    launches = Program(pipeline, workload.blocked(), slots=4).launches()
    feedback = None
    while True:
        launch = launches.send(feedback)
        feedback = Feedback(masked=True) if launch.stage.decides else None
        if launch.stage.name == stage_name:
            return costs.stage_cost(launch.stage, launch.shape, launch.layer)


@pytest.mark.parametrize(("method", "apart"), [("herald", True), ("herald-no-draft", True), ("mage-cpu", False)])
def test_a_pass_that_a_block_s_steps_wait_for_has_the_steps_cores(emulated, method, apart):
    def on_retrieval_cores(stage):
        flows = (phase for phase in cost_of(emulated, stage, method).phases if isinstance(phase, Flow))
        return any(name == RETRIEVAL_CORES for flow in flows for name, _ in flow.uses)

    assert on_retrieval_cores("select") == on_retrieval_cores("finish") == apart
    assert on_retrieval_cores("upload")


def test_retrieval_kernels_do_not_hold_up_the_main_stream(emulated):
    alone = cost_of(emulated, "denoise").total_ns / 1e9
    workload = Workload.uniform(4096, 4, gen_tokens=128, steps=4)
    beside = simulate(build(catalogue.get("llada2-mini"), "herald"), emulated, workload)
    real_gpu = simulate(
        build(catalogue.get("llada2-mini"), "herald"),
        replace(emulated, machine=replace(emulated.machine, gpu=replace(emulated.machine.gpu, emulated=False))),
        workload,
    )
    assert alone > 0
    assert mean_s(beside, "denoise") < mean_s(real_gpu, "denoise")


def test_retrieval_kernels_become_work_on_the_retrieval_cores(emulated):
    phases = cost_of(emulated, "project").phases
    assert all(isinstance(phase, Flow) for phase in phases)
    assert all((RETRIEVAL_CORES, 1.0) in phase.uses for phase in phases)
    assert any(isinstance(phase, Kernels) for phase in cost_of(emulated, "denoise").phases)


def test_selection_and_a_gather_beside_it_take_turns():
    one = ((RETRIEVAL_CORES, 1.0), ("dram", 0.2))
    assert fair_speeds([one, one]) == pytest.approx((0.5, 0.5))


def test_fixed_costs_of_gathers_and_copies_are_added_to_their_stages_only(emulated):
    numbers = {"gather_overhead_us": (300.0, "us"), "h2d_overhead_us": (400.0, "us"), "d2h_overhead_us": (500.0, "us")}
    slow = with_engine(emulated, **numbers)
    added = {
        name: cost_of(slow, name).total_ns - cost_of(emulated, name).total_ns
        for name in ("gather", "upload", "draft_down", "select", "project")
    }
    assert added == {
        "gather": pytest.approx(300_000, abs=2),
        "upload": pytest.approx(400_000, abs=2),
        "draft_down": pytest.approx(500_000, abs=2),
        "select": 0,
        "project": 0,
    }


def test_retrievals_own_layer_overhead_is_carried_by_both_halves_of_a_layer(emulated):
    base = with_engine(emulated, retrieval_layer_overhead_us=(100.0, "us"))
    slow = with_engine(emulated, retrieval_layer_overhead_us=(300.0, "us"))
    for name in ("project", "finish"):
        assert cost_of(slow, name).total_ns - cost_of(base, name).total_ns == pytest.approx(100_000, abs=2)
    assert cost_of(slow, "denoise").total_ns == cost_of(base, "denoise").total_ns


@pytest.mark.parametrize(("stage", "share"), [("project", 0.75), ("finish", 0.25)])
def test_the_projection_carries_its_share_of_retrievals_layer_overhead(emulated, stage, share):
    stated = {"retrieval_project_share": (0.75, "share")}
    base = with_engine(emulated, retrieval_layer_overhead_us=(100.0, "us"), **stated)
    slow = with_engine(emulated, retrieval_layer_overhead_us=(300.0, "us"), **stated)
    assert cost_of(slow, stage).total_ns - cost_of(base, stage).total_ns == pytest.approx(200_000 * share, abs=2)


def test_attention_priced_by_its_products_costs_twice_as_much_for_twice_the_queries(emulated):
    slow = with_engine(emulated, attention_flops_efficiency=(0.001, "share"))
    costs = CostModel(build(catalogue.get("llada2-mini"), "herald"), slow)
    forward_one = costs.pipeline.template.denoise
    from herald_pipeline.stages import Mode, RowGroup, launch_shape

    def total(mode):
        group = RowGroup((0,), (1,), mode, 65536, 3276, 32)
        return costs.stage_cost(forward_one, launch_shape((group,), 32), None).total_ns

    assert total(Mode.DRAFT) / total(Mode.DENOISE) == pytest.approx(2.0, rel=0.1)


def test_invariants_hold_on_an_emulated_gpu(emulated):
    assert run(emulated).throughput_tok_s > 0
