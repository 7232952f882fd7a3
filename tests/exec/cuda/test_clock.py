"""Streams of a GPU without one: events that know when they passed, on a clock that drifts against the host's."""

import threading
import time
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from herald_exec.cuda import streams as module
from herald_exec.cuda.streams import CudaStreams
from herald_pipeline.errors import RunError

DRIFT = 0.2
"""The fake device's clock gains this share: thousands of times what a real one does."""


class Event:
    """Passes ``delay_s`` after it was recorded, in the order of its stream."""

    def __init__(self):
        self.passed_s = 0.0

    def record(self, stream):
        stream.free_s = max(stream.free_s, time.perf_counter()) + stream.delay_s
        self.passed_s = stream.free_s

    def query(self):
        return time.perf_counter() >= self.passed_s

    def synchronize(self):
        time.sleep(max(0.0, self.passed_s - time.perf_counter()))

    def elapsed_time(self, later):
        return (later.passed_s - self.passed_s) * (1 + DRIFT) * 1e3


class Stream:
    def __init__(self, device=None, priority=0):
        self.priority, self.free_s, self.delay_s = priority, 0.0, 0.0
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)
        self.free_s = max(self.free_s, event.passed_s)

    def synchronize(self):
        pass


@pytest.fixture
def opened(monkeypatch):
    for name, fake in (("Stream", Stream), ("synchronize", lambda device: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(module, "_event", Event)
    monkeypatch.setattr(module, "_NEW_ANCHOR_NS", 10_000_000)
    freed = []
    streams = CudaStreams(
        ["main", "retrieval"], torch.device("cpu"), high_priority={"retrieval"}, on_close=lambda: freed.append(True)
    )
    yield streams
    streams.close()
    assert freed == [True]


def submit(streams, stream, work=lambda: None, after=(), host=False, told=None):
    def run(done):
        value = work()
        streams.when_ended(done, lambda: told is not None and told.append(done))
        return value

    return streams.submit(stream, f"work on {stream}", run, after, host=host)


def test_a_stream_with_priority_is_opened_with_it(opened):
    assert opened._device_streams["retrieval"].priority < opened._device_streams["main"].priority


def test_the_device_waits_for_an_event_and_the_host_does_not(opened):
    opened._device_streams["main"].delay_s = 0.2
    first = submit(opened, "main")
    second = submit(opened, "retrieval", after=(first,))
    assert second.wait(5.0)
    issued_s = time.perf_counter()
    assert opened._device_streams["retrieval"].waited == [first.ended]
    assert issued_s < first.ended.passed_s
    assert not first.done
    assert not second.done
    opened.wait(second)
    assert first.done
    assert second.done


def test_work_of_the_host_waits_until_the_device_has_passed(opened):
    opened._device_streams["main"].delay_s = 0.05
    first = submit(opened, "main")
    begun = []
    opened.wait(submit(opened, "retrieval", lambda: begun.append(time.perf_counter()), (first,), host=True))
    assert begun[0] >= first.ended.passed_s


def test_work_of_the_host_waits_for_its_own_streams_copies(opened):
    opened._device_streams["main"].delay_s = 0.05
    first = submit(opened, "main")
    begun = []
    opened.wait(submit(opened, "main", lambda: begun.append(time.perf_counter()), host=True))
    assert begun[0] >= first.ended.passed_s


def test_a_value_is_read_once_and_only_after_the_device_has_passed(opened):
    opened._device_streams["main"].delay_s = 0.05
    reads = []

    def late():
        reads.append((time.perf_counter(), threading.current_thread() is threading.main_thread()))
        return "outcome"

    completion = submit(opened, "main", lambda: late)
    assert opened.wait(completion) == "outcome"
    opened.drain()
    ((read_s, by_caller),) = reads
    assert by_caller
    assert read_s >= completion.ended.passed_s


def test_times_keep_their_order_though_the_clocks_drift(opened):
    """Device and host work in turn, over many anchors: nothing starts before what it waited for had ended."""
    for stream in opened._device_streams.values():
        stream.delay_s = 0.002
    told, issued, waits = [], [], []
    last = ()
    for i in range(30):
        stream = ("main", "retrieval")[i % 2]
        last = (submit(opened, stream, lambda: time.sleep(0.001), last, host=i % 3 == 0, told=told),)
        issued.append(last[0])
        waits.append(issued[-2:-1])
        if i % 5 == 4:
            opened.wait(last[0])
    opened.drain()
    assert told == issued
    for completion, earlier in zip(issued, waits, strict=True):
        assert completion.start_ns <= completion.end_ns
        assert all(completion.start_ns >= before.end_ns for before in earlier)
    for name in ("main", "retrieval"):
        lane = [c for c in issued if c.stream == name]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(lane))


def test_a_failure_in_a_stream_is_the_runs_error(opened):
    def fail():
        raise RunError("the device is on fire")

    completion = submit(opened, "main", fail)
    with pytest.raises(RunError, match="on fire"):
        opened.wait(completion)
