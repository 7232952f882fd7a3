"""Kernels take longer while the device fetches rows by programs that go first, and such a fetch beside kernels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.workload import Workload
from herald_sim.beside_fetches import GpuBesideFetches
from herald_sim.clock import Clock
from herald_sim.phases import BESIDE, H2D, KERNELS, Flow, Kernels
from herald_sim.resources import Gpu, SharedRates, Work
from herald_sim.simulate import simulate

STEP, PROXY, FETCH = (
    f"engine.{name}" for name in ("step_beside_row_fetch", "proxy_beside_row_fetch", "row_fetch_beside_step")
)
SLOWER_FETCH = ((H2D, 1.0), (BESIDE + KERNELS, 0.8))


class Named(Work):
    def __init__(self, name):
        self.name = name


def run(kernels, fetches, uses=((H2D, 1.0),)):
    """Ends of kernels ``(at, ns, longer beside a fetch, small)`` and of fetches ``(at, ns)``, one of each by index."""
    env, ends = Clock(), {}

    def done(work, now):
        gpu.flow_ended(work, now)
        ends[work.name] = now

    gpu = GpuBesideFetches(env, done)
    start = gpu.beside(SharedRates(env, done))
    for index, (at, time, longer, small) in enumerate(kernels):
        work = Kernels(time, 10.0, 10.0, longer)
        env.after(at, (Named(("k", index)), work, small), lambda e: gpu.start(*e.value, env.now_ns))
    for index, (at, time) in enumerate(fetches):
        env.after(at, (Named(("f", index)), Flow(time, uses, holds_gpu=True)), lambda e: start(*e.value, env.now_ns))
    env.run()
    return ends


def test_a_launch_goes_slower_for_exactly_the_time_of_a_fetch():
    # 100 alone, then 200 that bring 100, then the last 300.
    assert run([(0, 500, 2.0, False)], [(100, 200)])["k", 0] == 600


def test_a_launch_that_a_fetch_outlasts_takes_as_many_times_as_long():
    assert run([(50, 500, 1.5, False)], [(0, 2000)])["k", 0] == 50 + 750


def test_a_launch_that_begins_or_ends_within_a_fetch_is_stretched_for_that_part_alone():
    # The fetch until 300 brings 100 of 400.
    assert run([(100, 400, 2.0, False)], [(0, 300)])["k", 0] == 600
    # 200 alone; of the other 200 each takes two.
    assert run([(0, 400, 2.0, False)], [(200, 5000)])["k", 0] == 600


def test_two_fetches_at_once_cost_a_launch_no_more_than_one():
    # They share the link: both are under way from 0 to 400.
    assert run([(0, 600, 2.0, False)], [(0, 200), (0, 200)]) == {("f", 0): 400, ("f", 1): 400, ("k", 0): 800}


def test_launches_that_take_turns_are_each_as_much_slower_as_they_are():
    # Equal kernels take turns: small and large alternate 100 ns of 10 each at 2 and 3 times their time.
    ends = run([(0, 100, 2.0, True), (0, 100, 3.0, False)], [(0, 10_000)])
    assert ends["k", 0] == ends["k", 1] == 500


def test_a_fetch_is_slower_while_kernels_run_and_at_full_speed_behind_them():
    # 400 beside kernels bring 320.
    ends = run([(0, 400, 1.0, False)], [(0, 1000)], SLOWER_FETCH)
    assert ends["f", 0] == 400 + 680


def test_a_fetch_without_kernels_beside_it_takes_its_own_time():
    assert run([(2000, 400, 2.0, False)], [(0, 1000)], SLOWER_FETCH)["f", 0] == 1000


@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300), st.booleans()), min_size=1, max_size=5),
)
def test_without_fetches_it_is_the_plain_gpu(jobs):
    ends = run([(at, time, 3.0, small) for at, time, small in jobs], [])
    env, plain = Clock(), {}
    gpu = Gpu(env, lambda work, now: plain.__setitem__(work.name, now))
    for index, (at, time, small) in enumerate(jobs):
        work = Kernels(time, 10.0, 10.0)
        env.after(at, (Named(("k", index)), work, small), lambda e: gpu.start(*e.value, env.now_ns))
    env.run()
    assert ends == plain


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(1, 400)), min_size=1, max_size=4),
    st.integers(0, 300),
    st.integers(1, 900),
    st.sampled_from([1.0, 1.25, 1.6, 3.0]),
)
def test_what_is_left_is_priced_anew_at_each_begin_and_end_of_a_fetch(fetches, at, time, longer):
    ends = run([(at, time, longer, False)], fetches)
    busy = [(fetch_at, ends["f", index]) for index, (fetch_at, _) in enumerate(fetches)]
    # Reference: nanosecond by nanosecond, half a one at a time.
    left, now = float(time), float(at)
    while left > 1e-9:
        slow = any(begin <= now < end for begin, end in busy)
        left -= 0.5 / (longer if slow else 1.0)
        now += 0.5
    assert ends["k", 0] == pytest.approx(now, abs=2)


# Runs ----------------------------------------------------------------------------------------------------------------


def stages(profile, pipeline, batch=16, context=32768):
    found = simulate(pipeline, profile, Workload.uniform(context, batch, gen_tokens=96), beyond_memory=True, check=True)
    return found.throughput_tok_s, {name: s["busy_s"] / s["count"] for name, s in found.stages.items()}


@pytest.fixture(scope="module")
def measured():
    return lambda *overrides: hardware_io.resolve("h200-141g_emr-16vcpu-3", None, overrides)


def test_stretched_steps_lower_the_throughput_of_fetches_for_every_step(measured, pipeline_of):
    step_fetch = pipeline_of("step-fetch", gather="gpu")
    none, before = stages(measured(), step_fetch)
    some, after = stages(measured(f"{STEP}=1.6"), step_fetch)
    assert some < none
    # All steps but a forward's last one, and proxies for most of their time, run beside a fetch.
    assert 1.5 < after["step_layer"] / before["step_layer"] < 1.6
    assert 1.3 < after["proxy"] / before["proxy"] < 1.6
    assert after["upload"] == pytest.approx(before["upload"], rel=1e-6)


def test_a_proxy_of_its_own_factor_is_slower_by_that_one(measured, pipeline_of):
    step_fetch = pipeline_of("step-fetch", gather="gpu")
    _, as_step = stages(measured(f"{STEP}=1.6"), step_fetch, batch=38)
    _, own = stages(measured(f"{STEP}=1.6", f"{PROXY}=1.0"), step_fetch, batch=38)
    assert own["step_layer"] == pytest.approx(as_step["step_layer"], rel=1e-6)
    assert own["proxy"] == pytest.approx(stages(measured(), step_fetch, batch=38)[1]["proxy"], rel=1e-6)


def test_a_fetch_is_longer_beside_steps(measured, pipeline_of):
    step_fetch = pipeline_of("step-fetch", gather="gpu")
    _, before = stages(measured(), step_fetch)
    _, after = stages(measured(f"{FETCH}=1.25"), step_fetch)
    assert 1.1 < after["upload"] / before["upload"] < 1.25


@pytest.mark.parametrize("number", [STEP, PROXY, FETCH])
def test_a_factor_of_one_changes_nothing(number, measured, pipeline_of):
    step_fetch = pipeline_of("step-fetch", gather="gpu")
    assert stages(measured(f"{number}=1.0"), step_fetch) == stages(measured(), step_fetch)


@pytest.mark.parametrize(
    ("method", "settings"), [("herald", {"gather": "gpu"}), ("step-fetch", {}), ("dense", {}), ("infinigen", {})]
)
def test_where_nothing_is_fetched_first_beside_kernels_nothing_changes(method, settings, measured, pipeline_of):
    pipeline = pipeline_of(method, **settings)
    stated = measured(f"{STEP}=1.6", f"{PROXY}=1.6", f"{FETCH}=1.2")
    assert stages(stated, pipeline, batch=4) == stages(measured(), pipeline, batch=4)


@pytest.mark.parametrize("number", [STEP, PROXY, FETCH])
def test_a_time_beside_something_below_the_time_alone_is_refused(number, measured):
    with pytest.raises(ConfigError, match=r"must be >= 1 .*got 0\.9"):
        measured(f"{number}=0.9")
