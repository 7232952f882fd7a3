"""The GPU's kernel queue and the shared rates, against a slow reference that steps through every kernel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_sim.clock import Clock
from herald_sim.cost import Flow, Kernels
from herald_sim.resources import Gpu, SharedRates, Work, fair_speeds


class Named(Work):
    def __init__(self, name):
        self.name = name


def kernels(*segments):
    total = sum(time * count for time, count in segments)
    return Kernels(round(total), tuple((float(time), count) for time, count in segments), sum(c for _, c in segments))


def run_gpu(jobs):
    """Start ``(at, name, kernels, small)`` jobs; returns the end of each."""
    env, ends = Clock(), {}
    gpu = Gpu(env, lambda work, now: ends.__setitem__(work.name, now))
    for at, name, work, small in jobs:
        env.after(at, (name, work, small), lambda e: gpu.start(Named(e.value[0]), e.value[1], e.value[2], env.now_ns))
    env.run()
    return ends


def kernel_by_kernel(large, small, small_at):
    """Ends of a large launch from time 0 and a small one, found by running each kernel in turn."""
    big = [time for time, count in large.segments for _ in range(count)]
    little = [time for time, count in small.segments for _ in range(count)]
    now, ends = 0.0, {}
    while big or little:
        arrived = now >= small_at
        if (little and arrived and (now > 0 or not big)) or (little and not big):
            now = max(now, small_at) + little.pop(0)
            if not little:
                ends["small"] = now
        if big:
            now += big.pop(0)
            if not big:
                ends["large"] = now
    return ends


def test_a_launch_alone_takes_its_own_time():
    assert run_gpu([(0, "a", kernels((10, 7)), False)]) == {"a": 70}


def test_small_kernels_wait_for_boundaries_and_push_the_large_launch_back():
    # Arrives inside the third of ten kernels of 100 ns: its kernels run after boundaries 300, 400, 500.
    ends = run_gpu([(0, "large", kernels((100, 10)), False), (250, "small", kernels((7, 3)), True)])
    assert ends == {"small": 300 + 7 + 100 + 7 + 100 + 7, "large": 1000 + 21}


def test_a_long_kernel_holds_small_ones_up_longer_than_many_short_ones():
    short = run_gpu([(0, "large", kernels((10, 100)), False), (5, "small", kernels((1, 4)), True)])
    long = run_gpu([(0, "large", kernels((100, 10)), False), (5, "small", kernels((1, 4)), True)])
    assert short["small"] < long["small"]
    assert short["large"] == long["large"] == 1004


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(0, 300),
)
def test_arithmetic_equals_running_every_kernel(segments, small_ns, small_count, small_at):
    large, small = kernels(*segments), kernels((small_ns, small_count))
    ends = run_gpu([(0, "large", large, False), (small_at, "small", small, True)])
    assert ends == kernel_by_kernel(large, small, small_at)


def test_small_kernels_left_over_alternate_with_the_next_large_launch():
    first, second, small = kernels((100, 2)), kernels((50, 4)), kernels((5, 4))
    ends = run_gpu([(0, "a", first, False), (0, "b", second, False), (50, "small", small, True)])
    # One inside a (after 100), then at a's end (205) the second, then after b's kernels of 50.
    assert ends["a"] == 205
    assert ends["small"] == 205 + 5 + 50 + 5 + 50 + 5
    assert ends["b"] == 205 + 5 + 4 * 50 + 10


@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 40), st.integers(1, 8), st.booleans()), min_size=1, max_size=8
    )
)
def test_work_on_the_gpu_is_neither_lost_nor_invented(jobs):
    listed = [(at, index, kernels((time, count)), small) for index, (at, time, count, small) in enumerate(jobs)]
    ends = run_gpu(listed)
    assert set(ends) == set(range(len(jobs)))
    busy = sum(work.total_ns for _, _, work, _ in listed)
    assert max(ends.values()) <= max(at for at, *_ in listed) + busy + len(jobs)
    for at, index, work, _ in listed:
        assert ends[index] >= at + work.total_ns - 1


def run_flows(flows):
    env, ends = Clock(), {}
    rates = SharedRates(env, lambda work, now: ends.__setitem__(work.name, now))
    for at, name, flow in flows:
        env.after(at, (name, flow), lambda e: rates.start(Named(e.value[0]), e.value[1], env.now_ns))
    env.run()
    return ends


def test_two_copies_on_one_link_take_turns_fairly():
    link = (("h2d", 1.0),)
    assert run_flows([(0, "a", Flow(100, link)), (0, "b", Flow(100, link))]) == {"a": 200, "b": 200}
    # b has the link alone once a is done.
    assert run_flows([(0, "a", Flow(100, link)), (0, "b", Flow(300, link))]) == {"a": 200, "b": 400}


def test_flows_that_leave_room_do_not_slow_each_other():
    half = (("dram", 0.5),)
    assert run_flows([(0, "a", Flow(100, half)), (10, "b", Flow(100, half))]) == {"a": 100, "b": 110}


def test_a_flow_stopped_by_one_rate_leaves_the_rest_of_another_to_others():
    # Two copies share the link at half speed, so they use 0.1 of DRAM and the selection 0.9 of it.
    speeds = fair_speeds([(("h2d", 1.0), ("dram", 0.1)), (("h2d", 1.0), ("dram", 0.1)), (("dram", 1.0),)])
    assert speeds == pytest.approx((0.5, 0.5, 0.9))


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["dram", "h2d", "d2h"]), st.floats(0.01, 1.0), min_size=1),
        min_size=1,
        max_size=6,
    )
)
def test_no_rate_is_ever_exceeded_and_something_is_used_up_when_anything_is_slowed(demands):
    uses = [tuple(demand.items()) for demand in demands]
    speeds = fair_speeds(uses)
    load = {}
    for flow, speed in zip(uses, speeds, strict=True):
        for name, share in flow:
            load[name] = load.get(name, 0) + share * speed
    assert all(value <= 1 + 1e-9 for value in load.values())
    for flow, speed in zip(uses, speeds, strict=True):
        assert speed == 1.0 or any(load[name] == pytest.approx(1.0) for name, _ in flow)
