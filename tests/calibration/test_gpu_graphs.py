"""Order of what a timed graph is made of, with the device replaced by a log."""

import gc
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from calibration.bench import Bench
from calibration.gpu import graphs
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline.model import KVDtype


class _Graph:
    def replay(self):
        pass


@pytest.fixture
def log(monkeypatch):
    """What reaches the device, in order; no CUDA device is touched."""
    found = []

    @contextmanager
    def stream(_stream):
        found.append("on the stream")
        yield

    class Memory:
        def capture(self, work):
            found.append("captured")
            return _Graph(), work()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: found.append("all streams waited for"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: object())
    monkeypatch.setattr("herald_exec.cuda.graphs.GraphMemory", Memory)
    return found


def test_work_waits_for_arguments_that_the_default_stream_fills(log):
    """Lengths not there yet are any number: attention read beyond its pool and the device was lost."""
    bench = Bench(tiny().shape, torch.device("cuda"), torch.bfloat16, Plan(), KVDtype.BF16, KVDtype.BF16, fused=True)
    graphs.captured(bench, {"a": lambda: log.append("work")})
    assert log == ["all streams waited for", "on the stream", "work", "work", "captured", "work"]


def test_arguments_of_captured_work_live_as_long_as_its_replay(log):
    """A graph reads lengths where they lay: freed, the memory is somebody else's."""
    bench = Bench(tiny().shape, torch.device("cuda"), torch.bfloat16, Plan(), KVDtype.BF16, KVDtype.BF16, fused=True)
    lengths = torch.zeros(2)
    kept = weakref.ref(lengths)
    replays = graphs.captured(bench, {"a": partial(torch.sum, lengths)})
    del lengths
    gc.collect()
    assert kept() is not None
    replays.clear()
    gc.collect()
    assert kept() is None
