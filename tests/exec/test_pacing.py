"""A paced link: what its bucket lets through, and that runs on it take longer and say the same."""

import pytest

from herald_exec import Options, decode
from herald_exec.models import tiny
from herald_exec.pacing import Bucket
from herald_pipeline.errors import ConfigError


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


def bucket(clock, rate=1.0):
    return Bucket(rate, lambda: clock.now, clock.sleep)


def test_a_gigabyte_at_a_gigabyte_a_second_takes_a_second():
    clock = Clock()
    bucket(clock).hold(0.0, 1e9)
    assert clock.now == pytest.approx(1.0)


def test_copies_in_a_row_share_the_rate():
    clock = Clock()
    found = bucket(clock)
    for _ in range(3):
        found.hold(clock.now, 5e8)
    assert clock.now == pytest.approx(1.5)


def test_a_copy_that_took_longer_by_itself_is_not_held_back():
    clock = Clock()
    found = bucket(clock)
    clock.now = 7.0
    found.hold(5.0, 1e9)
    assert clock.now == 7.0


def test_a_pause_earns_nothing():
    clock = Clock()
    found = bucket(clock)
    found.hold(0.0, 1e9)
    clock.now = 100.0
    found.hold(100.0, 1e9)
    assert clock.now == pytest.approx(101.0)


@pytest.mark.parametrize("name", ["herald", "layer-prefetch"])
def test_a_paced_run_gives_the_same_tokens_and_no_copy_is_faster_than_its_link(kit, name):
    model = tiny()
    pipeline = kit.describe(name, model.shape, budget=0.3)
    requests = kit.prompts([64], 8)
    free = decode(pipeline, model, requests, options=Options())
    rate_gb_s = 0.002
    held = decode(pipeline, model, requests, options=Options(link_limit_gb_s=rate_gb_s, keep_trace=True))
    assert held.answers == free.answers
    copies = [s for s in held.trace.spans if s.stage in ("upload", "fetch", "append", "draft_down") and s.bytes]
    assert copies
    for span in copies:
        assert span.bytes / (span.end_ns - span.start_ns) <= rate_gb_s * 1.001


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-9, float("nan"), float("inf")])
def test_a_rate_that_cannot_be_is_refused(kit, rate):
    model = tiny()
    with pytest.raises(ConfigError, match="link_limit_gb_s"):
        decode(kit.describe("herald", model.shape), model, kit.prompts([64], 8), options=Options(link_limit_gb_s=rate))
