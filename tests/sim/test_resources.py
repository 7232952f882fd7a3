"""The GPU's turns and the shared rates, against a slow reference that steps through every kernel."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_sim.clock import Clock
from herald_sim.phases import FIRST, Flow, Kernels
from herald_sim.resources import Gpu, SharedRates, Work, fair_speeds


class Named(Work):
    def __init__(self, name):
        self.name = name


def kernels(*segments):
    """A launch of runs of equal kernels, as (nanoseconds of one, how many)."""
    total, count = sum(time * count for time, count in segments), sum(count for _, count in segments)
    return Kernels(round(total), total / count, sum(time * time * count for time, count in segments) / total)


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
    big = [time for time, count in large for _ in range(count)]
    little = [time for time, count in small for _ in range(count)]
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


def test_small_kernels_wait_for_large_ones_and_push_their_launch_back():
    # Three turns of 100 ns of the large launch and 7 ns of the small one.
    ends = run_gpu([(0, "large", kernels((100, 10)), False), (250, "small", kernels((7, 3)), True)])
    assert ends == {"small": 250 + 3 * 107, "large": 1000 + 21}


def test_a_long_kernel_holds_small_ones_up_longer_than_many_short_ones():
    short = run_gpu([(0, "large", kernels((10, 100)), False), (5, "small", kernels((1, 4)), True)])
    long = run_gpu([(0, "large", kernels((100, 10)), False), (5, "small", kernels((1, 4)), True)])
    assert short["small"] < long["small"]
    assert short["large"] == long["large"] == 1004


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 9), st.integers(1, 12), st.integers(0, 300))
def test_among_equal_kernels_the_flow_is_within_a_turn_of_running_each(time, count, small_ns, small_count, small_at):
    ends = run_gpu(
        [(0, "large", kernels((time, count)), False), (small_at, "small", kernels((small_ns, small_count)), True)]
    )
    exact = kernel_by_kernel([(time, count)], [(small_ns, small_count)], small_at)
    for name, end in exact.items():
        assert abs(ends[name] - end) <= time + small_ns + 1


@pytest.mark.parametrize("runs", [((10, 800), (100, 200)), ((5, 400), (40, 100), (200, 100))])
def test_in_the_mean_over_arrivals_small_kernels_wait_as_long_as_if_each_were_run(runs):
    """Among unequal kernels one arrival meets long kernels, another short ones; the flow is their mean."""
    small, whole = (3, 10), sum(time * count for time, count in runs)
    arrivals = range(1, whole * 9 // 10, whole // 97)
    waited, flow = 0.0, 0.0
    for at in arrivals:
        twice = [*runs, *runs]
        waited += kernel_by_kernel(twice, [small], at)["small"] - at
        flow += run_gpu([(0, "large", kernels(*twice), False), (at, "small", kernels(small), True)])["small"] - at
    assert flow == pytest.approx(waited, rel=0.1)


def test_what_is_left_of_a_small_launch_goes_on_beside_the_next_large_one():
    first, second, small = kernels((100, 2)), kernels((50, 4)), kernels((5, 4))
    ends = run_gpu([(0, "a", first, False), (0, "b", second, False), (50, "small", small, True)])
    # a has 150 ns to go: 1.5 turns of 105. Then 2.5 turns of 55, and the rest of b.
    assert ends["a"] == pytest.approx(50 + 1.5 * 105, abs=1)
    assert ends["small"] == pytest.approx(50 + 1.5 * 105 + 2.5 * 55, abs=1)
    assert ends["b"] == 400 + 20


def test_a_large_launch_that_joins_a_small_one_shares_what_is_left():
    ends = run_gpu([(0, "small", kernels((10, 10)), True), (60, "large", kernels((20, 30)), False)])
    assert ends == {"small": 60 + 4 * 30, "large": 60 + 600 + 40}


def chain(forwards, waits, kernel_ns, count, wait_ns):
    """End of ``forwards`` back to back beside small launches with ``waits`` between them, whichever is later."""
    env, ends = Clock(), {"large": 0, "small": 0}
    left = {"large": list(forwards), "small": list(waits)}

    def begin(name, now):
        if name == "large" and left[name]:
            gpu.start(Named(name), Kernels(left[name].pop(0), 1.0, wait_ns), False, now)
        elif name == "small" and left[name]:
            env.after(left[name].pop(0), None, lambda _: gpu.start(Named(name), small, True, env.now_ns))

    def ended(work, now):
        ends[work.name] = now
        begin(work.name, now)

    gpu, small = Gpu(env, ended), Kernels(kernel_ns * count, float(kernel_ns), 1.0)
    for name in ("large", "small"):
        begin(name, 0)
    env.run()
    return max(ends.values())


@given(
    st.lists(st.integers(100, 5000), min_size=1, max_size=6),
    st.lists(st.integers(1, 3000), min_size=1, max_size=8),
    st.integers(2, 60),
    st.integers(1, 16),
    st.integers(1, 500),
    st.data(),
)
def test_nothing_that_gets_shorter_makes_the_end_later(forwards, waits, kernel_ns, count, wait_ns, data):
    """Forwards, waits between launches, kernels and the turn that they wait: no accident of who meets whom is left."""
    before = chain(forwards, waits, kernel_ns, count, wait_ns)
    shorter = [data.draw(st.integers(1, value)) for value in forwards]
    sooner = [data.draw(st.integers(1, value)) for value in waits]
    smaller, turn = data.draw(st.integers(1, kernel_ns)), data.draw(st.integers(1, wait_ns))
    rounding = len(forwards) + 2 * len(waits) + 1
    assert chain(shorter, sooner, smaller, count, turn) <= before + rounding


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


def test_what_goes_first_is_not_slowed_and_pushes_a_bulk_copy_back_by_its_own_time():
    env, ends = Clock(), {}
    rates = SharedRates(env, lambda work, now: ends.__setitem__(work.name, now))
    rates.start(Named("pool"), Flow(1000, (("h2d", 1.0),)), 0)
    env.at(300, None, (lambda _: rates.start(Named("outputs"), Flow(50, (("h2d", 1.0), (FIRST, 0.0))), 300),))
    env.run()
    assert ends == {"outputs": 350, "pool": 1050}


def test_a_bulk_copy_that_comes_while_something_goes_first_stands_until_that_has_ended():
    env, ends = Clock(), {}
    rates = SharedRates(env, lambda work, now: ends.__setitem__(work.name, now))
    rates.start(Named("outputs"), Flow(50, (("h2d", 1.0), (FIRST, 0.0))), 0)
    rates.start(Named("pool"), Flow(100, (("h2d", 1.0),)), 0)
    env.run()
    assert ends == {"outputs": 50, "pool": 150}


def test_flows_behind_those_that_go_first_share_what_is_left():
    queries, pool = (("d2h", 1.0), ("duplex", 0.6), (FIRST, 0.0)), (("h2d", 1.0), ("duplex", 0.6))
    assert fair_speeds([pool, queries]) == pytest.approx((0.4 / 0.6, 1.0))


def test_what_is_slower_beside_a_scan_is_so_only_while_one_runs():
    gather, scan = (("beside scan", 0.5),), (("dram", 1.0), ("scan", 0.0))
    # Half of 60 ns is done beside the scan, the other 70 after it; the scan takes no notice.
    assert run_flows([(0, "scan", Flow(60, scan)), (0, "gather", Flow(100, gather))]) == {"scan": 60, "gather": 130}
    # The second scan meets what is left after 40 ns alone.
    joined = run_flows([(0, "gather", Flow(100, gather)), (40, "scan", Flow(90, scan))])
    assert joined == {"scan": 130, "gather": 145}


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
