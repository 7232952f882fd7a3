"""The timing loop against a clock that the test moves by hand (U08)."""

import statistics

import pytest

from calibration.timing import HostClock, Plan, Timing, interleaved, spread, time_one
from herald_pipeline.errors import ConfigError, ProfileError

MS = 1_000_000


class Bench:
    """A clock, and work that moves it: sample i of ``durations_ns`` (the last one for ever)."""

    def __init__(self, *durations_ns):
        self.durations = list(durations_ns)
        self.now = 0
        self.calls = 0

    def work(self):
        index = min(self.calls, len(self.durations) - 1)
        self.now += self.durations[index]
        self.calls += 1

    def clock(self):
        return HostClock(lambda: self.now)


def cyclic(*durations_ns, repeat=100):
    return Bench(*(list(durations_ns) * repeat))


def test_two_first_samples_sixty_times_slower_leave_no_trace():
    bench = Bench(600 * MS, 600 * MS, 10 * MS)
    timing = time_one("gemm", bench.work, Plan(warmup=2, repeats=9), bench.clock())
    assert timing.seconds == 0.010
    assert timing.spread == 0.0
    assert timing.warmup == 2


def test_every_third_sample_slow_is_refused_with_the_samples_shown():
    bench = cyclic(10 * MS, 10 * MS, 600 * MS)
    with pytest.raises(ProfileError) as refused:
        time_one("gemm", bench.work, Plan(), bench.clock())
    message = str(refused.value)
    assert "gemm: spread" in message
    assert message.count("600.00 ms") == 3
    assert "--max-spread" in message


@pytest.mark.parametrize("repeats", range(6, 20))
def test_every_third_sample_slow_is_refused_for_any_number_of_samples(repeats):
    samples = tuple(0.6 if i % 3 == 2 else 0.01 for i in range(repeats))
    with pytest.raises(ProfileError):
        Timing("x", samples, 1).check(0.25)


def test_one_disturbed_sample_of_nine_is_accepted_and_does_not_move_the_value():
    timing = Timing("x", (0.01,) * 8 + (0.5,), 1)
    timing.check(0.25)
    assert timing.seconds == 0.01


def test_spread_is_the_standard_deviation_of_normal_samples():
    normal = statistics.NormalDist(100.0, 5.0)
    samples = tuple(normal.inv_cdf((i + 0.5) / 1000) for i in range(1000))
    assert spread(samples) == pytest.approx(0.05, rel=0.01)


def test_a_single_sample_has_no_spread():
    assert spread((0.1,)) == 0.0


def test_a_disturbance_that_passes_is_measured_anew():
    noisy = [10 * MS, 30 * MS, 10 * MS, 30 * MS, 10 * MS, 30 * MS]
    bench = Bench(10 * MS, *noisy, 10 * MS)
    timing = time_one("x", bench.work, Plan(warmup=1, repeats=6, more=3), bench.clock())
    assert timing.seconds == 0.010
    assert (len(timing.samples), timing.disturbed) == (6, 6)


def test_cases_are_sampled_in_turn():
    order = []
    clock = HostClock(iter(range(0, 10**12, 10 * MS)).__next__)
    cases = {name: (lambda name=name: order.append(name)) for name in ("a", "b", "c")}
    interleaved(cases, Plan(warmup=1, repeats=6), clock)
    assert order[3:] == ["a", "b", "c"] * 6


def test_short_work_is_repeated_within_a_sample():
    bench = Bench(100_000)
    timing = time_one("launch", bench.work, Plan(warmup=1, repeats=6, sample_s=0.002), bench.clock())
    assert bench.calls == 1 + 6 * 20
    assert timing.seconds == pytest.approx(1e-4)


def test_work_that_takes_no_time_is_refused():
    with pytest.raises(ProfileError, match="too short for the clock"):
        time_one("nothing", lambda: None, Plan(), HostClock(lambda: 0))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("warmup", 0, "warmup must be >= 1, got 0"),
        ("repeats", 5, "repeats must be >= 6, got 5"),
        ("max_spread", 0.0, "max_spread must be > 0, got 0.0"),
        ("max_spread", float("nan"), "max_spread must be finite, got nan"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(field, value, problem):
    with pytest.raises(ConfigError, match=problem):
        Plan(**{field: value})
