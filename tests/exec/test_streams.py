"""Streams: order within one, no order between two, edges, and every way in which a run can die."""

import ctypes
import threading
import time

import pytest

from herald_exec import Options, decode, execution
from herald_exec.models import tiny
from herald_exec.streams import ThreadStreams, split_cores
from herald_pipeline.errors import RunError


@pytest.fixture
def streams():
    opened = ThreadStreams(["a", "b"])
    yield opened
    opened.close()


def test_work_of_one_stream_runs_in_order(streams):
    seen = []
    for i in range(50):
        streams.submit("a", str(i), lambda _, i=i: seen.append(i), ())
    streams.drain()
    assert seen == list(range(50))


def test_streams_run_beside_one_another_without_an_edge_and_after_one_another_with_it(streams):
    def overlap(after_first):
        first = streams.submit("a", "first", lambda _: time.sleep(0.05), ())
        second = streams.submit("b", "second", lambda _: time.sleep(0.05), (first,) if after_first else ())
        begun = []
        second_start = streams.submit("b", "mark", lambda _: begun.append(1), ())
        streams.wait(second_start)
        streams.wait(first)
        return second.start_ns < first.start_ns + 50_000_000

    assert overlap(after_first=False)
    assert not overlap(after_first=True)


def test_the_first_failure_is_the_one_that_is_raised_and_nothing_hangs(streams):
    def fail(_):
        raise ValueError("layer 1")

    failing = streams.submit("a", "failing", fail, ())
    behind = streams.submit("b", "behind", lambda _: pytest.fail("ran after the failure"), (failing,))
    with pytest.raises(ValueError, match="layer 1"):
        streams.wait(behind)
    with pytest.raises(ValueError, match="layer 1"):
        streams.submit("a", "more", lambda _: None, ())


def test_a_killed_thread_is_noticed(streams):
    """SystemExit raised inside the thread from outside, as a debugger or a supervisor does."""
    started = threading.Event()

    def spin(_):
        started.set()
        while True:
            time.sleep(0.001)

    completion = streams.submit("a", "spinning", spin, ())
    started.wait()
    victim = next(thread for thread in threading.enumerate() if thread.name == "herald-a")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit))
    with pytest.raises(SystemExit):
        streams.wait(completion)


def test_a_thread_that_ended_without_a_word_is_noticed(streams):
    streams.submit("a", "fine", lambda _: None, ())
    streams.drain()
    streams._queues["a"].put(None)  # the thread leaves its loop as if it had been taken away
    completion = streams.submit("a", "never", lambda _: None, ())
    with pytest.raises(RunError, match="stream 'a' ended without a word; its last work was never"):
        streams.wait(completion)


def test_closed_streams_take_no_work(streams):
    streams.close()
    with pytest.raises(RunError, match="closed"):
        streams.submit("a", "late", lambda _: None, ())


def test_close_leaves_no_thread_behind():
    opened = ThreadStreams(["x", "y"])
    opened.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("herald-x", "herald-y")]


def test_main_and_retrieval_get_different_cores():
    cores = split_cores(["main", "retrieval", "gather"])
    if not cores:
        pytest.skip("one core only: nothing is bound")
    assert not cores["main"] & cores["retrieval"]
    assert cores["gather"] == cores["retrieval"]
    assert split_cores(["main"]) == {}


@pytest.mark.parametrize(
    ("method", "apart"),
    [("herald", True), ("herald-no-draft", True), ("mage-cpu", False), ("mage-cpu-representative", False)],
)
def test_a_pass_that_a_block_s_steps_wait_for_shares_their_cores(method, apart, kit, monkeypatch):
    asked = []

    def noted(names):
        asked.append(names)
        return {}

    monkeypatch.setattr(execution, "split_cores", noted)
    model = tiny(block_length=8, num_layers=3)
    decode(kit.describe(method, model.shape, budget=0.3), model, kit.prompts([16], 16), options=Options(pin_cores=True))
    assert [("retrieval" in names) for names in asked] == [apart]
