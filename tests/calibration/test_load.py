"""Constant load of passes of full attention and of passes over selected entries, with the device's kernels left out."""

import pytest
import torch

from calibration.bench import Bench, Part
from calibration.gpu import attention, layers, load
from calibration.timing import Plan, Timing
from herald_exec.models import tiny
from herald_pipeline.model import KVDtype


@pytest.fixture
def bench():
    return Bench(tiny().shape, torch.device("cpu"), torch.float32, Plan(), KVDtype.FP32, KVDtype.FP32, block_length=8)


@pytest.fixture
def attended(monkeypatch):
    """(requests, entries, most layers) of every attention that a pass has run, in order."""
    found = []

    class Pool:
        def __init__(self, _bench, _points):
            pass

        def layers(self, _rows, _length):
            return 2

        def work(self, rows, length, most=None):
            return lambda: found.append((rows, length, most))

    monkeypatch.setattr(attention, "Pool", Pool)
    monkeypatch.setattr(layers, "layers_model", lambda _: None)
    monkeypatch.setattr(layers, "layer", lambda *_, **__: lambda: None)
    return found


def test_a_pass_over_selected_entries_reads_the_exact_layers_in_full_and_the_budget_of_the_others(bench, attended):
    pool = attention.Pool(bench, ())
    load.selected_entries(bench, pool, 3, 1000)()
    layers_of_model = bench.shape.num_layers
    # Two exact layers, the others with 5% of the context and a block.
    assert attended == [(3, 1000, 2), (3, 50 + 8, layers_of_model - 2)]


def test_each_kind_of_pass_has_a_share_of_its_own(bench, attended, monkeypatch):
    def timings(_bench, work):
        attended.clear()
        work()
        full = len({length for _, length, _ in attended}) == 1
        return Timing("", (1.0, 1.0), 1), Timing("", (1.25 if full else 1.05,) * 2, 1)

    monkeypatch.setattr(load, "_timings", timings)
    part = Part("load")
    load.measure(bench, part)
    full, sparse = part.values
    assert (full.path, sparse.path) == ("engine.constant_load_efficiency", "engine.constant_load_efficiency_sparse")
    assert full.y == pytest.approx((0.8, 0.8))
    assert sparse.y == pytest.approx((1 / 1.05,) * 2)
    assert full.x == sparse.x == (8.0, 16.0)
    assert {row["attends"] for row in part.rows} == {"full attention", "selected entries"}


def test_passes_are_timed_with_rests_and_without(bench, attended):
    part = Part("load")
    load.measure(bench, part)
    assert len(part.rows) == 2 * (len(load.sizes(bench)) + len(load.sparse_sizes(bench)))
    assert all(0 < y <= 1 for value in part.values for y in value.y)
    assert attended
