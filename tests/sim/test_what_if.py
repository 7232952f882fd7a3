"""What-ifs behave: more of a resource never hurts, more work never takes less, the ring moves with what binds."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from herald_pipeline import capacity, catalogue, hardware_io, methods
from herald_pipeline.capacity import Memory
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import parse as parse_steps
from herald_pipeline.workload import Workload
from herald_sim import fast
from herald_sim.ceilings import ceilings
from herald_sim.explain import scaled
from herald_sim.simulate import simulate

PROFILE = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
MODEL = catalogue.get("llada2-mini")
RESOURCES = (
    ("gpu", "bandwidth_gb_s"),
    ("gpu", "peak_tflop_s"),
    ("dram", "read_gb_s"),
    ("cpu", "attention_tflop_s"),
    ("link", "h2d_gb_s"),
    ("link", "d2h_gb_s"),
)
METHODS = ("dense", "mage-offload", "infinigen", "mage-cpu", "mage-cpu-representative", "herald", "herald-no-draft")
BESIDE = ("herald", "herald-no-draft", "herald-32q")
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)
"""An example here is two whole runs: the first that fails says enough, and making it smaller takes minutes."""
_ROUNDING = 1e-6
"""A launch ends on a whole nanosecond: of hundreds of launches a block, in hundreds of milliseconds."""
TOLERANCES = {"h100": _ROUNDING, "h200": 1e-3}
"""The measured machine's forwards have turns of the host between their kernels, and its link's directions share a rate:
the proof (docs/more-never-hurts.md) leaves both out. Seen at most: 1.5e-4.
"""
_OUT_OF_STEP = 1e-3
"""Of a decode whose rows, or halves, begin blocks at different times: the proof is for a batch that begins together."""


def block_time(method, profile, context, batch, steps):
    workload = Workload.uniform(context, batch, gen_tokens=128, steps=steps)
    return simulate(build(MODEL, method), profile, workload, beyond_memory=True, check=True).block_time_s


ALL = tuple(sorted(set(methods.names()) - {"herald-sliding"}))
"""A sliding window takes other blocks: it has a test of its own below."""
BASES = {"h100": PROFILE, "h200": hardware_io.resolve("h200-141g_emr-16vcpu")}
"""The paper's machine, and a measured one: its rates are curves, its link's directions share a rate, and retrieval's
kernels wait for thread blocks alone."""

BESIDE_SCANS = hardware_io.resolve("h200-141g_emr-16vcpu-3")
"""A measured machine whose profile says how much longer gathers and uploads take beside a scan."""


SCALES = st.tuples(*(st.floats(-3.0, 3.0) for _ in RESOURCES))
machines = st.tuples(st.sampled_from(sorted(BASES)), SCALES)
"""Any machine: a known one's name, and the power of two by which each of its rates is scaled."""
runs = st.tuples(
    st.sampled_from(ALL),
    st.sampled_from(["llada2-mini", "sdar-8b"]),
    st.sampled_from([0.05, 0.2, 0.4]),
    st.sampled_from([4096, 16384, 32768]),
    st.integers(1, 96),
    st.integers(1, 32),
)
"""Method, model, budget, context, batch and steps."""
more = st.tuples(st.sampled_from(RESOURCES), st.floats(1.01, 8.0))


def before_and_after(machine, change):
    """The machine, and the same with more of one resource."""
    base, scales = machine
    profile = BASES.get(base, BESIDE_SCANS)
    for resource, scale in zip(RESOURCES, scales, strict=True):
        profile = scaled(profile, *resource, 2.0**scale)
    resource, factor = change
    return profile, scaled(profile, *resource, factor)


def described(run):
    """The pipeline and the workload of a run."""
    method, model, budget, context, batch, steps = run
    pipeline = build(catalogue.get(model), method, budget=budget)
    return pipeline, Workload.uniform(context, batch, gen_tokens=256, steps=steps)


def by_events(pipeline, profile, workload):
    """Seconds a block with everything that contends."""
    return simulate(pipeline, profile, workload, beyond_memory=True).block_time_s


@settings(max_examples=60, deadline=None, phases=UNSHRUNK)
@given(runs, machines, more)
def test_more_of_any_resource_never_hurts_on_any_machine(run, machine, change):
    """Every method and rate, with GPU, link and host memory contended for."""
    pipeline, workload = described(run)
    before, after = (by_events(pipeline, profile, workload) for profile in before_and_after(machine, change))
    assert after <= before * (1 + TOLERANCES[machine[0]])


@settings(max_examples=40, deadline=None, phases=UNSHRUNK)
@given(runs, machines, more)
def test_nor_does_it_without_contention_which_only_ever_lengthens(run, machine, change):
    pipeline, workload = described(run)
    profiles = before_and_after(machine, change)
    before, after = (fast.evaluate(pipeline, profile, workload).block_time_s for profile in profiles)
    assert after <= before * (1 + TOLERANCES[machine[0]])
    # Blocks are counted from the second one's end, which contention puts off more than later ones.
    assert by_events(pipeline, profiles[0], workload) >= before * (1 - TOLERANCES[machine[0]])


def of_unequal_steps(batch, seed, policy):
    """A workload whose rows take 4 to 24 steps for a block."""
    steps = parse_steps("uniform:4,24", 32, seed)
    return Workload.uniform(16384, batch, gen_tokens=256, steps=steps, policy=policy)


def decode_time(pipeline, profile, workload):
    """Seconds from the first block's start to the run's end: of a run whose prefill takes no time."""
    sections = pipeline.template.prefill
    at_once = tuple(
        replace(section, stages=tuple(replace(stage, work=lambda _shape, _layer: ()) for stage in section.stages))
        for section in sections
    )
    ready = replace(pipeline, template=replace(pipeline.template, prefill=at_once))
    result = simulate(ready, profile, workload, beyond_memory=True)
    return result.delivered_tokens / result.end_to_end_tok_s


AS_MEASURED = (0.0,) * len(RESOURCES)


@settings(max_examples=25, deadline=None, phases=UNSHRUNK)
@given(st.sampled_from(BESIDE), machines, st.integers(2, 64), more, st.integers(0, 99), st.sampled_from(BatchPolicy))
@example("herald", ("h200", AS_MEASURED), 24, (("gpu", "peak_tflop_s"), 2.0), 0, BatchPolicy.TWO_BATCH_OVERLAP)
@example(
    "herald-no-draft",
    ("h200", (-2.39, 0.0, -2.9, -1.34, 0.0, 0.0)),
    8,
    (("gpu", "bandwidth_gb_s"), 1.1),
    19,
    BatchPolicy.LOCKSTEP,
)
@example(
    "herald-no-draft",
    ("h100", (-0.216, 1.763, 0.0, 0.0, 2.847, -1.759)),
    51,
    (("link", "h2d_gb_s"), 1.2),
    94,
    BatchPolicy.FIRST_DONE_FIRST_OUT,
)
def test_nor_does_a_decode_end_later_where_rows_take_different_numbers_of_steps(
    method, machine, batch, change, seed, policy
):
    """The whole decode, and not a block's time behind the warm-up: what the warm-up saves is not in that.

    The figures' window opens when the warm-up's forwards have ended. Where retrieval binds, a faster GPU saves time
    only in the blocks at both of the window's ends, and more at the first if that block has more steps. In the second
    example the warm-up ends 26 ms earlier and the run 21: a block of the window takes 0.18% more, the decode 0.5% less.
    Of two halves in turn, retrieval gets ahead besides while forwards bind, and later blocks use that up: in the first
    example a block of the window takes 0.5% more (0.25768 -> 0.25906 s) and the decode 7.5% less.

    Where not all rows begin a block together, there is an anomaly of schedules too. A forward waits for one row's
    upload while another row's retrieval has the GPU to itself; a faster link has the forward begin sooner, and that
    retrieval takes turns with it from then on. The third example ends 2.4e-5 later.
    Seen at most, of 386 pairs: 1.05e-4.
    """
    pipeline, workload = build(MODEL, method), of_unequal_steps(batch, seed, policy)
    before, after = (decode_time(pipeline, profile, workload) for profile in before_and_after(machine, change))
    together = policy is BatchPolicy.LOCKSTEP
    assert after <= before * (1 + (TOLERANCES[machine[0]] if together else _OUT_OF_STEP))


def test_halves_whose_blocks_look_slower_behind_the_warm_up_end_earlier_with_each_faster_gpu():
    """From 1.1 to 1.5 times the GPU the window's blocks get 3.8% slower, and the decode 2% faster."""
    pipeline, workload = build(MODEL, "herald"), of_unequal_steps(24, 0, BatchPolicy.TWO_BATCH_OVERLAP)
    gpus = [scaled(BASES["h200"], "gpu", "peak_tflop_s", factor) for factor in (1.0, 1.1, 1.5, 2.0, 8.0)]
    times = [decode_time(pipeline, gpu, workload) for gpu in gpus]
    assert times == sorted(times, reverse=True)


@settings(max_examples=20, deadline=None, phases=UNSHRUNK)
@given(st.sampled_from((*BESIDE, "mage-cpu")), SCALES, st.integers(1, 96), st.integers(1, 32), more)
def test_nor_where_gathers_and_uploads_are_slower_beside_a_scan(method, scales, batch, steps, change):
    """Of 241 such pairs none beyond 3.6e-5."""
    pipeline, workload = build(MODEL, method), Workload.uniform(16384, batch, gen_tokens=256, steps=steps)
    pair = before_and_after(("beside scans", scales), change)
    before, after = (by_events(pipeline, profile, workload) for profile in pair)
    assert after <= before * (1 + TOLERANCES["h200"])


@settings(max_examples=15, deadline=None, phases=UNSHRUNK)
@given(SCALES, st.floats(1.0, 3.0), st.integers(1, 96), st.integers(1, 16), more)
def test_nor_where_steps_and_row_fetches_are_slower_beside_each_other(scales, longer, batch, steps, change):
    """Of 217 such pairs none beyond 2.7e-5. What both reach at once is no less than one after the other would."""
    of_fetches = min(2.0, longer / (longer - 1.0)) if longer > 1.0 else 2.0
    numbers = {"step_beside_row_fetch": longer, "row_fetch_beside_step": of_fetches}
    stated = [f"engine.{name}={value!r}" for name, value in numbers.items()]
    measured = hardware_io.resolve("h200-141g_emr-16vcpu-3", None, stated)
    pipeline = build(MODEL, "step-fetch", gather="gpu")
    workload = Workload.uniform(16384, batch, gen_tokens=128, steps=steps)
    for resource, scale in zip(RESOURCES, scales, strict=True):
        measured = scaled(measured, *resource, 2.0**scale)
    resource, factor = change
    pair = (measured, scaled(measured, *resource, factor))
    before, after = (by_events(pipeline, profile, workload) for profile in pair)
    assert after <= before * (1 + TOLERANCES["h200"])


@settings(max_examples=15, deadline=None, phases=UNSHRUNK)
@given(machines, st.integers(1, 48), more)
def test_nor_under_a_window_that_slides(machine, batch, change):
    pipeline = build(MODEL, "herald-sliding")
    workload = Workload.uniform(16384, batch, gen_tokens=256, steps=10)
    before, after = (by_events(pipeline, profile, workload) for profile in before_and_after(machine, change))
    assert after <= before * (1 + TOLERANCES[machine[0]])


@pytest.mark.parametrize(
    ("steps", "batch", "factor"), [(18, 28, 2.17), (17, 130, 1.072), (2, 98, 1.243), (26, 80, 1.05), (6, 82, 1.203)]
)
@pytest.mark.parametrize("name", ["bandwidth_gb_s", "peak_tflop_s"])
def test_nor_where_single_kernels_met_longer_ones(name, steps, batch, factor):
    """Points at which a faster GPU cost up to 4.5%, while each retrieval kernel waited for the very one it met."""
    workload = Workload.uniform(32768, batch, gen_tokens=256, steps=steps)
    before, after = (
        by_events(build(MODEL, "herald"), profile, workload)
        for profile in (PROFILE, scaled(PROFILE, "gpu", name, factor))
    )
    assert after <= before * (1 + _ROUNDING)


@pytest.mark.parametrize("method", ["herald", "mage-cpu-representative", "specontext"])
@pytest.mark.parametrize("budget", [0.05, 0.4])
def test_nor_does_a_faster_link_where_host_memory_is_short(method, budget):
    """Copies that came in bursts took host memory from selection, which slower ones had left to it: up to 10%."""
    pipeline, workload = build(MODEL, method, budget=budget), Workload.uniform(32768, 60, gen_tokens=256, steps=8)
    short = scaled(scaled(BASES["h200"], "dram", "read_gb_s", 0.5), "gpu", "bandwidth_gb_s", 4.0)
    times = [
        by_events(pipeline, scaled(short, "link", "h2d_gb_s", factor), workload) for factor in (0.2, 0.5, 1.0, 4.0)
    ]
    for slower, faster in pairwise(times):
        assert faster <= slower * (1 + TOLERANCES["h200"])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(METHODS),
    st.sampled_from([("gpu", "memory_gb"), ("dram", "capacity_gb")]),
    st.floats(0.3, 3.0),
    st.floats(1.01, 4.0),
    st.sampled_from([4096, 32768]),
)
def test_more_memory_never_holds_fewer_requests(method, part, share, factor, context):
    pipeline, less = build(MODEL, method), scaled(PROFILE, *part, share)
    before, after = (
        capacity.largest_batch(pipeline, context, Memory.of(profile)) for profile in (less, scaled(less, *part, factor))
    )
    assert after >= before


@settings(max_examples=15, deadline=None, phases=UNSHRUNK)
@given(st.sampled_from(METHODS), st.integers(1, 40), st.integers(1, 24))
def test_more_work_never_takes_less_time(method, batch, steps):
    base = block_time(method, PROFILE, 16384, batch, steps)
    assert block_time(method, PROFILE, 16384, batch + 8, steps) >= base * (1 - _ROUNDING)
    assert block_time(method, PROFILE, 32768, batch, steps) >= base * (1 - _ROUNDING)
    assert block_time(method, PROFILE, 16384, batch, steps + 8) >= base * (1 - _ROUNDING)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(METHODS), st.integers(1, 300), st.sampled_from([4096, 32768, 65536]))
def test_what_fits_still_fits_with_one_request_less(method, batch, context):
    pipeline, memory = build(MODEL, method), Memory.of(PROFILE)
    if batch > 1 and capacity.budget(pipeline, context, batch, memory).fits:
        assert capacity.budget(pipeline, context, batch - 1, memory).fits


def ring(profile, scheme):
    rows = [row for row in ceilings(MODEL, profile, 32768) if row["scheme"] == scheme]
    (binding,) = [row for row in rows if row["binding"]]
    assert binding["value_tok_s"] == min(row["value_tok_s"] for row in rows)
    return binding["name"]


@pytest.mark.parametrize(
    ("scheme", "before", "more", "after"),
    [
        ("full KV fetched each step", "full_kv_fetch_per_step", [("link", "h2d_gb_s")], "gpu_full_kv_forward"),
        ("sparse KV fetched each step", "sparse_fetch_per_step", [("link", "h2d_gb_s")], "gpu_sparse_forward"),
        (
            "CPU selection, one query, once a block",
            "gpu_sparse_forward",
            [("gpu", "bandwidth_gb_s"), ("gpu", "peak_tflop_s")],
            "cpu_1q_kernel",
        ),
    ],
)
def test_removing_what_binds_moves_the_ring(scheme, before, more, after):
    profile = PROFILE
    assert ring(profile, scheme) == before
    for section, name in more:
        profile = scaled(profile, section, name, 1000.0)
    assert ring(profile, scheme) == after


LINK, HOST = [("link", "h2d_gb_s")], [("dram", "read_gb_s"), ("cpu", "attention_tflop_s")]


@pytest.mark.parametrize(
    ("method", "batch", "before", "more", "after"),
    [
        ("mage-offload", 48, "h2d link", LINK, "gpu"),
        ("infinigen", 16, "h2d link", LINK, "gpu"),
        ("mage-cpu", 80, "cpu selection", HOST, "gpu"),
        ("herald", 80, "cpu selection", HOST, "gpu"),
        ("herald-32q", 80, "cpu selection", HOST, "gpu"),
    ],
)
def test_removing_what_binds_a_run_moves_what_binds_it(method, batch, before, more, after):
    pipeline, workload = build(MODEL, method), Workload.uniform(32768, batch, gen_tokens=256)
    limits, rates = [], []
    profile = PROFILE
    for resource in (None, *more):
        profile = profile if resource is None else scaled(profile, *resource, 1000.0)
        found = simulate(pipeline, profile, workload, beyond_memory=True)
        limits.append(found.limit)
        rates.append(found.throughput_tok_s)
    assert (limits[0], limits[-1]) == (before, after)
    assert rates[-1] > rates[0]


def test_ceilings_state_formula_inputs_and_provenance():
    for row in ceilings(MODEL, PROFILE, 32768):
        assert row["formula"]
        assert row["inputs"]["B"] == 32
        assert set(row["provenance"].values()) <= {"published", "fitted", "datasheet", "assumed", "counted"}


def test_fetch_ceilings_are_one_number_twenty_times_over():
    values = {row["name"]: row["value_tok_s"] for row in ceilings(MODEL, PROFILE, 32768)}
    assert values["sparse_fetch_per_step"] == pytest.approx(20 * values["full_kv_fetch_per_step"])
    assert values["sparse_fetch_per_block"] == pytest.approx(400 * values["full_kv_fetch_per_step"])
