"""Rates of their own for selections that read less, for other ways to gather, and for a device that never rests."""

from dataclasses import replace

import pytest

from herald_pipeline.errors import ProfileError
from herald_pipeline.hardware import Curve
from herald_pipeline.stages import LaunchShape
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel
from herald_sim.simulate import simulate

SHAPE = LaunchShape(4, 128, 64, 4 * 32768, 4 * 1638, 0, 128 * 32768, 128 * 1638)


def costs_of(pipeline, profile):
    """Nanoseconds of each stage's launch in the last layer."""
    model = CostModel(pipeline, profile)
    stages = pipeline.template.stages()
    return {s.name: model.stage_cost(s, SHAPE, s.layers[-1] if s.layers else None).total_ns for s in stages}


@pytest.mark.parametrize(
    ("keys", "name"), [("key-only", "select_keys_dram_efficiency"), ("int8", "select_int8_dram_efficiency")]
)
def test_a_selection_that_reads_less_has_its_own_share_of_the_read_rate(keys, name, changed_profile, pipeline_of):
    pipeline = pipeline_of("herald", keys=keys)
    base = changed_profile("engine.select_dram_efficiency=0.8")
    same, slow = (changed_profile(f"engine.{name}={share}", *base.overrides) for share in (0.8, 0.4))
    assert costs_of(pipeline, same)["select"] == costs_of(pipeline, base)["select"]
    assert costs_of(pipeline, slow)["select"] > 1.4 * costs_of(pipeline, base)["select"]


def test_what_a_fused_gather_adds_to_its_selection_is_its_own_share(changed_profile, pipeline_of):
    pipeline = pipeline_of("herald", gather="fused")
    free, dear = (
        costs_of(pipeline, changed_profile(f"engine.fused_gather_dram_efficiency={share}"))["select"]
        for share in (0.5, 0.25)
    )
    # What is copied beside the next scan is alike where the device reads the rows.
    plain = costs_of(pipeline_of("herald", gather="gpu"), changed_profile())["select"]
    assert dear - plain == pytest.approx(2 * (free - plain), rel=1e-6)


def test_rows_that_the_device_reads_itself_have_a_share_of_the_link(changed_profile, pipeline_of):
    pipeline = pipeline_of("herald", gather="gpu")
    fast, slow = (
        costs_of(pipeline, changed_profile(f"engine.row_fetch_efficiency={share}"))["upload"] for share in (0.6, 0.3)
    )
    assert slow == pytest.approx(2 * fast, rel=0.01)


@pytest.mark.parametrize(
    ("gather", "name"), [("fused", "fused_gather_dram_efficiency"), ("gpu", "row_fetch_efficiency")]
)
def test_a_profile_without_the_rate_is_refused_with_what_measures_it(gather, name, changed_profile, pipeline_of):
    profile = changed_profile()
    lacking = replace(profile, engine=replace(profile.engine, **{name: None}))
    workload = Workload.uniform(4096, 4, gen_tokens=128, steps=4)
    with pytest.raises(ProfileError, match=rf"{name}: `python -m calibration measure --only gather`"):
        simulate(pipeline_of("herald", gather=gather), lacking, workload)


def test_only_methods_that_leave_the_device_no_rest_run_at_the_rate_of_constant_load(changed_profile, pipeline_of):
    base, loaded = changed_profile(), changed_profile("engine.constant_load_efficiency=0.5")
    dense, herald = pipeline_of("dense", model="sdar-8b"), pipeline_of("herald")
    # Launch gaps and norms are fixed times: only work on the device takes longer.
    assert 1.5 < costs_of(dense, loaded)["denoise"] / costs_of(dense, base)["denoise"] < 2.0
    assert costs_of(herald, loaded)["denoise"] == costs_of(herald, base)["denoise"]


def test_steps_over_selected_entries_have_a_share_of_constant_load_of_their_own(changed_profile, pipeline_of):
    both = "engine.constant_load_efficiency=0.5", "engine.constant_load_efficiency_sparse=0.8"
    dense, ideal = (pipeline_of(method, model="sdar-8b") for method in ("dense", "ideal"))
    base, full, loaded = changed_profile(), changed_profile(both[0]), changed_profile(*both)
    assert costs_of(dense, loaded) == costs_of(dense, full)
    assert costs_of(ideal, changed_profile(both[1]))["denoise"] == costs_of(ideal, loaded)["denoise"]
    # Launch gaps and norms are fixed times: only work on the device takes longer.
    assert 1.1 < costs_of(ideal, loaded)["denoise"] / costs_of(ideal, base)["denoise"] < 1.25
    # A profile that states one share has it for both.
    assert 1.5 < costs_of(ideal, full)["denoise"] / costs_of(ideal, base)["denoise"] < 2.0


def test_experts_were_timed_under_load_and_take_no_longer_for_it(changed_profile, pipeline_of):
    changes = ("engine.constant_load_efficiency=0.5", "engine.grouped_gemm_efficiency=1e-5")
    base, loaded = changed_profile(changes[1]), changed_profile(*changes)
    dense = pipeline_of("dense", model="llada2-mini")
    # At so low a rate experts are all of a step.
    assert costs_of(dense, loaded)["denoise"] == pytest.approx(costs_of(dense, base)["denoise"], rel=0.02)


def test_a_step_is_priced_with_the_lanes_that_its_graph_has(changed_profile, pipeline_of):
    base, padded = changed_profile("engine.lane_padding=1.0"), changed_profile("engine.lane_padding=1.5")
    herald = pipeline_of("herald")
    longer = {name: costs_of(herald, padded)[name] / cost for name, cost in costs_of(herald, base).items() if cost}
    assert 1.1 < longer["denoise"] < 1.5
    # Retrieval forwards one token a request, in no lanes.
    assert longer["project"] == longer["finish"] == longer["select"] == 1.0


def test_a_profile_without_padding_is_one_with_none(changed_profile, pipeline_of):
    dense = pipeline_of("dense")
    assert costs_of(dense, changed_profile("engine.lane_padding=1.0")) == costs_of(dense, changed_profile())


def test_a_share_of_the_head_s_own_replaces_products_and_passes(changed_profile, pipeline_of):
    dense, own = pipeline_of("dense"), "engine.head_efficiency=0.02"
    plain = changed_profile(own)
    # What holds the choice already has no passes, and dense products' share does not matter to it.
    assert costs_of(dense, changed_profile(own, "engine.sampler_passes=50")) == costs_of(dense, plain)
    slower = (
        costs_of(dense, changed_profile("engine.head_efficiency=0.01"))["denoise"] - costs_of(dense, plain)["denoise"]
    )
    model = dense.model
    flops = 2 * SHAPE.masked_tokens * model.hidden_size * model.vocab_size
    peak = plain.machine.gpu.peak_tflop_s.peak * 1e3
    assert slower == pytest.approx(flops / peak * (1 / 0.01 - 1 / 0.02), rel=0.01)


def test_a_scan_loses_to_gathers_and_uploads_what_a_byte_of_each_costs(changed_profile, pipeline_of):
    herald, read = pipeline_of("herald"), changed_profile().machine.dram.read_gb_s.peak
    rows = SHAPE.selected_tokens * 2 * herald.model.num_kv_heads * herald.model.head_dim * 2
    plain = costs_of(herald, changed_profile())["select"]
    for name, moved in (("copy", rows), ("gather", 2 * rows)):
        dear = costs_of(herald, changed_profile(f"engine.{name}_beside_cost=3.0"))["select"]
        assert dear - plain == pytest.approx(2 * moved / read, rel=1e-3)


def test_a_proxy_with_a_share_of_its_own_is_priced_as_a_whole(changed_profile, pipeline_of):
    infinigen, base = pipeline_of("infinigen"), changed_profile()
    fast, slow = (changed_profile(f"engine.proxy_efficiency={share}") for share in (0.5, 0.25))
    read = SHAPE.prefix_tokens * infinigen.model.num_kv_heads * infinigen.model.head_dim * 2 * 0.2
    whole = read / base.machine.gpu.bandwidth_gb_s.peak
    difference = costs_of(infinigen, slow)["proxy"] - costs_of(infinigen, fast)["proxy"]
    assert difference == pytest.approx(whole * (1 / 0.25 - 1 / 0.5), rel=1e-3)
    # What picks is in it, however slow top-k by itself is.
    dear = changed_profile("engine.proxy_efficiency=0.5", "engine.top_k_efficiency=0.001")
    assert costs_of(infinigen, dear)["proxy"] == costs_of(infinigen, fast)["proxy"]


def test_a_pass_that_exchanges_a_block_with_the_cpu_pays_for_it_in_the_main_stream(changed_profile, pipeline_of):
    own = ("engine.exchange_project_us=800.0", "engine.exchange_finish_us=1600.0")
    cheap = changed_profile("engine.exchange_project_us=0.0", "engine.exchange_finish_us=0.0")
    dear = changed_profile(*own)
    for name, microseconds in (("project", 800), ("finish", 1600)):
        differences = [costs_of(pipeline_of("mage-cpu"), profile)[name] for profile in (cheap, dear)]
        assert differences[1] - differences[0] == pytest.approx(1000 * microseconds, rel=1e-3)
        # HERALD's pass of one query a request is the retrieval stream's.
        assert costs_of(pipeline_of("herald"), dear)[name] == costs_of(pipeline_of("herald"), cheap)[name]


def test_rows_that_a_device_reads_itself_have_no_fixed_cost_of_a_copy(changed_profile, pipeline_of):
    free, dear = (changed_profile(f"engine.h2d_overhead_us={us}") for us in (0.0, 500.0))
    by_device, by_copy = pipeline_of("herald", gather="gpu"), pipeline_of("herald")
    assert costs_of(by_device, dear)["upload"] == costs_of(by_device, free)["upload"]
    assert costs_of(by_copy, dear)["upload"] == costs_of(by_copy, free)["upload"] + 500_000


def test_a_gather_takes_longer_while_a_scan_runs(changed_profile, pipeline_of):
    workload = Workload.uniform(32768, 80, gen_tokens=96)
    plain, slowed = (changed_profile(f"engine.gather_beside_scan={x}") for x in (1.0, 3.0))

    def busy(method):
        pipeline = pipeline_of(method)
        found = [
            simulate(pipeline, p, workload, beyond_memory=True).stages["gather"]["busy_s"] for p in (plain, slowed)
        ]
        return found[1] / found[0]

    slower = busy("herald")
    assert 1.2 < slower <= 3.0
    # There a layer's scan waits until the device has finished the layer before, whose gather goes on meanwhile.
    assert busy("mage-cpu") < slower


def test_a_launch_to_the_host_has_the_fixed_cost_of_its_bytes(changed_profile, pipeline_of):
    herald, profile = pipeline_of("herald"), changed_profile("engine.d2h_overhead_us=0.0")
    size = SHAPE.rows * 32 * herald.model.kv_bytes_per_token(herald.settings.kv_dtype)
    origin = profile.engine.d2h_overhead_us.origin
    by_bytes = Curve((size / 2, size * 2), (1000.0, 3000.0), "B", "us", origin)
    priced = replace(profile, engine=replace(profile.engine, d2h_overhead_us=by_bytes))
    # In the middle of a curve that is read in the logarithm of its bytes.
    assert costs_of(herald, priced)["append"] - costs_of(herald, profile)["append"] == pytest.approx(
        2_000_000, rel=1e-6
    )


def test_copies_to_the_host_take_longer_beside_a_scan(changed_profile, pipeline_of):
    herald, workload = pipeline_of("herald"), Workload.uniform(32768, 80, gen_tokens=96)
    plain, slowed = (
        changed_profile("engine.d2h_overhead_us=5000.0", f"engine.down_beside_scan={x}") for x in (1.0, 4.0)
    )
    busy = [simulate(herald, p, workload, beyond_memory=True).stages["append"]["busy_s"] for p in (plain, slowed)]
    assert 1.5 < busy[1] / busy[0] <= 4.0


def test_a_small_selection_of_many_queries_takes_longer_for_its_arithmetic_alone(changed_profile, pipeline_of):
    name = "engine.select_size_cost"
    many, one = pipeline_of("mage-cpu"), pipeline_of("herald")
    plain, twice, thrice = (
        costs_of(many, changed_profile(*change)) for change in ((), (f"{name}=2.0",), (f"{name}=3.0",))
    )
    flops = 4 * SHAPE.rows * 32 * 32768 * many.model.num_heads * many.model.head_dim
    profile = changed_profile()
    share = profile.engine.select_flops_efficiency.at(32).value
    whole = flops / (profile.machine.cpu.attention_tflop_s.peak * share * 1e3)
    assert twice["select"] - plain["select"] == pytest.approx(whole, rel=0.01)
    assert thrice["select"] - twice["select"] == pytest.approx(whole, rel=0.01)
    # What one query loses to size is in its pass over the KV.
    assert costs_of(one, changed_profile(f"{name}=3.0")) == costs_of(one, changed_profile())


def test_the_cost_of_a_small_selection_is_read_at_its_bytes(changed_profile, pipeline_of):
    pipeline, profile = pipeline_of("mage-cpu"), changed_profile("engine.select_size_cost=1.0")
    model = pipeline.model
    size = SHAPE.prefix_tokens * 2 * model.num_kv_heads * model.head_dim * 2
    stated = profile.engine.select_size_cost
    curve = Curve((size / 4, size * 4), (1.5, 2.5), "B", "x", stated.origin)
    by_bytes = replace(profile, engine=replace(profile.engine, select_size_cost=curve))
    middle = replace(stated, value=2.0)
    expected = costs_of(pipeline, replace(profile, engine=replace(profile.engine, select_size_cost=middle)))
    assert costs_of(pipeline, by_bytes)["select"] == pytest.approx(expected["select"], rel=0.01)
