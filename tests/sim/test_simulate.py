import json
from dataclasses import replace

import pytest

from herald_pipeline import capacity, catalogue, hardware_io, methods
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import CapacityError, ProfileError
from herald_pipeline.pipeline import build
from herald_pipeline.pools import Home
from herald_pipeline.scheduling.lengths import check_length
from herald_pipeline.trace import read_chrome, validate
from herald_pipeline.workload import RequestSpec, Workload
from herald_sim.simulate import simulate

METHODS = methods.names()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_with_the_invariants_on(run, method):
    result = run(method)
    assert result.finished == 8
    assert result.delivered_tokens == 8 * 4 * 32
    assert result.forwards_per_block == 21
    assert result.throughput_tok_s > 0


@pytest.mark.parametrize("policy", ["lockstep", "first-done-first-out"])
@pytest.mark.parametrize("steps", ["1", "2", "uniform:1,6"])
def test_short_and_ragged_blocks_deliver_every_token(run, policy, steps):
    from herald_pipeline.steps import parse

    result = run("herald", steps=parse(steps), policy=policy, blocks=5)
    assert result.finished == 8
    assert result.delivered_tokens == 8 * 5 * 32


def test_a_row_takes_its_own_steps_and_one_completing_forward(run):
    from herald_pipeline.steps import ListedSteps

    result = run("dense", batch=2, steps=ListedSteps(((3,), (5,))), policy="first-done-first-out", blocks=6)
    assert result.tokens_per_forward == pytest.approx(32 / result.forwards_per_block)
    assert 4 < result.forwards_per_block < 6


def test_the_same_seed_gives_the_same_bytes(run):
    from herald_pipeline.steps import parse

    texts = {
        json.dumps(run("herald", steps=parse("uniform:2,9", 32, seed), policy="first-done-first-out").to_dict())
        for seed in (7, 7, 8)
    }
    assert len(texts) == 2


def test_dense_time_is_its_forwards_one_after_another(run):
    result = run("dense")
    assert result.block_time_s == pytest.approx(result.main_time_s)
    assert result.stall_s == 0


def test_halving_the_link_doubles_what_mage_offload_waits_for(run, changed_profile):
    whole = run("mage-offload", batch=64)
    half = run("mage-offload", batch=64, profile=changed_profile("machine.link.h2d_gb_s=13.84"))
    fetched, slower = (result.stages["fetch"]["busy_s"] for result in (whole, half))
    assert slower == pytest.approx(2 * fetched, rel=1e-6)
    # The stream of layers hides everything but the steps after it.
    assert half.block_time_s - whole.block_time_s == pytest.approx(fetched / 3, rel=0.05)


def test_halving_dram_doubles_the_pass_over_the_kv_but_not_the_queries_work(run, changed_profile, paper_profile):
    # Next to nothing is selected, so that gathering does not share the rate.
    whole = run("mage-cpu-representative", batch=64, budget=1e-4)
    slower = changed_profile("machine.dram.read_gb_s=153.6")
    half = run("mage-cpu-representative", batch=64, budget=1e-4, profile=slower)
    engine, machine = paper_profile.engine, paper_profile.machine
    model = catalogue.get("llada2-mini")
    per_request = model.kv_bytes_per_token() / (machine.dram.read_gb_s.peak * engine.select_dram_efficiency.peak)
    prefix = sum(32768 + 32 * block for block in (1, 2, 3)) * 64
    added = (half.stages["select"]["busy_s"] - whole.stages["select"]["busy_s"]) * 1e9
    assert added == pytest.approx(per_request * prefix, rel=1e-3)


def test_halving_the_gpu_halves_dense_but_for_its_fixed_cost(run, changed_profile, paper_profile):
    whole = run("dense")
    half = run("dense", profile=changed_profile("machine.gpu.bandwidth_gb_s=1675", "machine.gpu.peak_tflop_s=494.7"))
    fixed = 21 * 20 * paper_profile.engine.layer_overhead_us.peak * 1e-6
    assert half.block_time_s - fixed == pytest.approx(2 * (whole.block_time_s - fixed), rel=1e-6)


def test_herald_is_bound_by_retrieval_when_steps_are_few_and_by_the_gpu_when_many(run):
    few, many = run("herald", batch=80, steps=8), run("herald", batch=80, steps=32)
    assert few.stall_s > 0.2 * few.block_time_s
    assert many.stall_s < 0.01 * many.block_time_s


@pytest.mark.parametrize("method", ["mage-cpu", "mage-cpu-representative"])
def test_a_selection_in_line_is_a_chain_in_lockstep_and_runs_beside_the_other_halfs_steps_in_halves(run, method):
    lockstep, halves = (run(method, batch=80, policy=policy) for policy in ("lockstep", "two-batch-overlap"))
    assert lockstep.block_time_s == pytest.approx(lockstep.main_time_s + lockstep.stall_s)
    assert lockstep.block_time_s > lockstep.main_time_s + 0.98 * lockstep.retrieval_time_s
    # Weights are read by both halves' steps: what is hidden is more than that.
    assert halves.block_time_s < 0.9 * lockstep.block_time_s
    assert halves.main_time_s > lockstep.main_time_s
    assert halves.stall_s < 0.9 * lockstep.stall_s


def test_overlap_beats_the_same_work_in_line(run):
    assert run("herald", batch=80).block_time_s < run("mage-cpu-representative", batch=80).block_time_s


def test_the_trace_is_valid_and_counts_what_the_description_expects(tmp_path, paper_profile, pipeline_of):
    out = tmp_path / "run.json.gz"
    workload = Workload.uniform(4096, 4, gen_tokens=96, steps=3)
    result = simulate(pipeline_of("herald"), paper_profile, workload, trace_out=out)
    trace = read_chrome(out)
    assert trace.facts["result"]["throughput_tok_s"] == result.throughput_tok_s
    validate(trace)
    assert trace.source == "simulated"
    assert {span.stream for span in trace.spans} == {"main", "retrieval", "gather", "h2d", "d2h"}
    for span in trace.spans:
        assert span.bytes == pytest.approx(span.expected_bytes)
        assert span.flops == pytest.approx(span.expected_flops)


def test_what_does_not_fit_is_refused_with_the_budget_and_the_nearest_that_fits(paper_profile, pipeline_of):
    with pytest.raises(CapacityError, match="nearest that fits: batch 16") as caught:
        simulate(pipeline_of("dense"), paper_profile, Workload.uniform(32768, 17))
    assert "weights" in str(caught.value)
    assert "host memory" in str(caught.value)


def test_a_request_larger_than_the_pool_is_rejected_once_and_the_others_finish(paper_profile, pipeline_of):
    requests = (*(RequestSpec(i, 64, 64) for i in range(9)), RequestSpec(9, 4_000_000, 64))
    workload = Workload(requests, batch=10)
    result = simulate(pipeline_of("dense"), paper_profile, workload, memory=Memory.of(paper_profile), check=True)
    assert result.finished == 9
    assert list(result.rejected) == [9]
    assert "the limit is" in result.rejected[9]


def test_a_request_that_fits_only_without_rounding_up_is_rejected_with_the_text_of_generate(paper_profile, pipeline_of):
    """U12: room for 8,192 positions; 8170 + 20 = 8190 are asked for, blocks from the prompt's end on reach 8202."""
    pipeline = pipeline_of("dense")
    workload = Workload((RequestSpec(0, 8170, 20), RequestSpec(1, 8000, 64)), batch=1)
    wide = Memory(1e12, 1e12, 1e12)
    needed = capacity.budget(pipeline, 8192, 1, wide).total(Home.HBM, transient=False)
    result = simulate(pipeline, paper_profile, workload, memory=replace(wide, resident_bytes=needed), check=True)
    assert result.finished == 1
    assert result.rejected == {0: check_length(8170, 20, 32, 8192, "request 0")}
    assert "8190 tokens take 8202 positions" in result.rejected[0]


def test_a_profile_without_a_needed_number_fails_before_the_first_event(tmp_path, pipeline_of):
    text = (hardware_io.profile_dir() / "h100-sxm-80g_xeon-8481c.toml").read_text(encoding="utf-8")
    at = text.index('[fitted."engines.sglang-paper.select_dram_efficiency"]')
    end = text.index("\n[", at)
    text = text[:at] + text[end:]
    text = text.replace(
        'gather_dram_efficiency = { same_as = "select_dram_efficiency"',
        'gather_dram_efficiency = { same_as = "select_flops_efficiency"',
    )
    path = tmp_path / "lacking.toml"
    path.write_text(text, encoding="utf-8")
    profile = hardware_io.resolve(path)
    with pytest.raises(ProfileError, match=r"select_dram_efficiency.*measure"):
        simulate(pipeline_of("herald"), profile, Workload.uniform(4096, 2))
    assert simulate(pipeline_of("dense"), profile, Workload.uniform(4096, 2)).finished == 2


def test_padding_of_the_last_block_is_not_delivered(paper_profile, pipeline_of):
    result = simulate(pipeline_of("dense"), paper_profile, Workload.uniform(4096, 2, gen_tokens=70), check=True)
    assert result.delivered_tokens == 2 * 70


def test_arrivals_are_waited_for(paper_profile, pipeline_of):
    late = RequestSpec(1, 4096, 64, arrival_ns=10**10)
    workload = Workload((RequestSpec(0, 4096, 64), late), batch=2)
    result = simulate(build(catalogue.get("llada2-mini"), "herald"), paper_profile, workload, check=True)
    assert result.finished == 2
    assert result.status == "STABLE"


@pytest.mark.parametrize(
    ("method", "steps", "limit"),
    [
        ("dense", 20, "gpu"),
        ("mage-offload", 20, "h2d link"),
        ("mage-cpu", 20, "cpu selection"),
        ("herald", 8, "cpu selection"),
        ("herald", 32, "gpu"),
    ],
)
def test_what_limits_is_named(run, method, steps, limit):
    result = run(method, batch=80, steps=steps)
    assert (result.limit, result.status) == (limit, f"BOUND BY {limit}")
