"""What becomes of the times of steps, proxies and row fetches beside each other; kernels in Triton's interpreter."""

import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated

from calibration.bench import Bench, Part
from calibration.timing import Plan, Timing
from herald_exec import kernels
from herald_exec.models import tiny
from herald_pipeline.model import KVDtype

pytest.importorskip("triton", reason="Triton is not installed; it comes with the CUDA builds of PyTorch")

from calibration.gpu import beside_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="measured with the parts on a GPU: test_gpu_parts"),
]
FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)


def timing(seconds):
    return Timing("", (seconds,) * 6, 1)


@pytest.fixture
def bench():
    shape = replace(tiny().shape, block_length=8, num_layers=1)
    return Bench(shape, torch.device("cpu"), torch.float32, FAST, KVDtype.FP32, KVDtype.FP32, (), (), 8, quick=True)


def test_a_factor_is_the_median_of_rounds_each_against_its_own_time_alone():
    pair = beside_rows._Pair([(timing(1.0), timing(1.6)), (timing(2.0), timing(3.4)), (timing(1.0), timing(1.5))])
    assert pair.longer == pytest.approx(1.6)
    assert len(pair.timings[0].samples) == len(pair.timings[1].samples) == 18


def test_the_proxy_that_is_timed_picks_what_largest_weights_say(bench, monkeypatch):
    """The stage of a run, against the plain scores: random keys and queries are seen on their way."""
    made = []
    monkeypatch.setattr(Bench, "random", lambda _, *dims: made.append(torch.randn(*dims)) or made[-1])
    run = beside_rows.proxy(bench, model := beside_rows.layers.layers_model(bench), 2, 24, 5)
    picked = run()
    entered, columns, keys = made[-3:]
    shape, weights = model.shape, model.weights.layers[0]
    joined = torch.nn.functional.linear(entered, weights.qkv, weights.qkv_bias)
    from herald_exec.cuda.kernels.placing import place_heads

    rotary = model.rotary(torch.arange(16))
    heads = (shape.num_heads, shape.num_kv_heads)
    q, _, _ = place_heads(joined, weights.q_norm, weights.k_norm, rotary, shape.norm_eps, 2, heads)
    # [R, kv, B x group, d]: scores in float64, a softmax a query over the prefix, summed over queries.
    scores = (q.double() @ columns.double()) @ keys.double() * shape.head_dim**-0.5
    weights64 = scores.softmax(-1).sum(-2)
    for row in range(2):
        for head in range(shape.num_kv_heads):
            wanted = set(weights64[row, head].topk(5).indices.tolist())
            assert set(picked[row, head].tolist()) == wanted


def test_everything_is_timed_alone_and_beside_and_written_down(bench, monkeypatch):
    """Where there is no GPU nothing can run beside anything: what remains is the order of timings, and the table."""

    def once(cases, _plan, clock):
        return {name: timing(clock.seconds(work, 1)) for name, work in cases.items()}

    monkeypatch.setattr(beside_rows, "Beside", lambda _cores, _work: nullcontext())
    monkeypatch.setattr(beside_rows, "_ROUNDS", 1)
    monkeypatch.setattr(beside_rows, "interleaved", once)
    monkeypatch.setattr("calibration.bench.interleaved", once)
    monkeypatch.setattr(beside_rows, "batches", lambda _: (1, 2))
    part = Part("contention")
    with kernels.PagedKV(1, 2, bench.shape.num_kv_heads, 64, bench.shape.head_dim, "fp32") as pool:
        pool.fill_normal()
        beside_rows.measure(bench, part, pool, 64)
    told = {(row["rows"], row["case"], row["beside"]) for row in part.rows}
    assert told == {
        (rows, case, beside)
        for rows in (1, 2)
        for case, beside in [
            ("step", ""), ("step", "row fetch"), ("proxy", ""), ("proxy", "row fetch"),
            ("row_fetch", ""), ("row_fetch", "step"), ("row_fetch", "proxy"),
        ]
    }  # fmt: skip
    assert all(row["times_as_long"] > 0 for row in part.rows)
