"""The benchmark's cell that takes a layer's proxy and fetch apart, at a tiny size."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with the CUDA builds of PyTorch")

from benchmarks.gpu import proxy
from benchmarks.gpu.cells import parse
from herald_pipeline import catalogue

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def test_parts_are_timed_and_the_two_ways_to_pick_agree(device, monkeypatch):
    monkeypatch.setattr(proxy, "PROGRAMS", (2,))
    monkeypatch.setattr(proxy, "ROWS", (4, 8))
    on_cuda = device.type == "cuda"
    told = {"shape": catalogue.get("tiny"), "device": device, "on_cuda": on_cuda}
    bench = SimpleNamespace(**told, kv_dtype="bf16" if on_cuda else "fp32", threads=lambda _: 1)
    found = proxy.proxy(bench, parse("proxy:64:2"))
    assert min(found[name] for name in ("importance_ms", "pick_ms", "sorted_pick_ms")) > 0
    assert [(each["programs"], each["rows"]) for each in found["fetch"]] == [(2, 4), (2, 8)]
    assert all(each["gb_s"] > 0 for each in found["fetch"])
    scores = proxy.Scores(bench, parse("proxy:64:2"))
    scores.pick()
    assert torch.equal(scores.picked, scores.pick_by_sorting())
