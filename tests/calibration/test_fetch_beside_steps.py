"""What becomes of the times of row fetches alone and beside steps; kernels in Triton's interpreter."""

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
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype

pytest.importorskip("triton", reason="Triton is not installed; it comes with the CUDA builds of PyTorch")

from calibration.gpu import fetch_beside_steps
from calibration.gpu.fetch_beside_steps import longer, value

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="measured with the parts on a GPU: test_gpu_parts"),
]
FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)


def timing(*seconds):
    return Timing("", seconds, 1)


def test_fetches_of_which_every_other_one_meets_a_step_count_by_their_mean():
    assert longer(timing(1.0, 1.0, 1.0, 1.0), timing(1.0, 1.4, 1.0, 1.4)) == pytest.approx(1.2)


def test_no_fetch_is_faster_for_a_step_beside_it():
    assert longer(timing(1.0, 1.0), timing(0.9, 0.9)) == 1.0


def test_the_factor_is_a_curve_over_bytes_with_the_engines_unit():
    found = value([(8e6, timing(2.0, 2.0), timing(2.2, 2.2)), (2e6, timing(1.0, 1.0), timing(1.5, 1.5))])
    assert (found.path, found.x) == ("engine.row_fetch_beside_step", (2e6, 8e6))
    assert found.y == pytest.approx((1.5, 1.1))
    assert found.unit == specs(Engine)["row_fetch_beside_step"].unit


def test_fetches_are_timed_alone_and_beside_steps_and_written_down(monkeypatch):
    """Where there is no GPU nothing can run beside anything: what remains is the order of timings, and the table."""
    shape = replace(tiny().shape, block_length=8, num_layers=1)
    cpu = torch.device("cpu")
    bench = Bench(shape, cpu, torch.float32, FAST, KVDtype.FP32, KVDtype.FP32, (), (), 8, quick=True)

    def once(cases, _plan, clock):
        return {name: timing(*(clock.seconds(work, 1),) * 6) for name, work in cases.items()}

    monkeypatch.setattr(fetch_beside_steps, "Beside", lambda _cores, _work: nullcontext())
    monkeypatch.setattr(fetch_beside_steps, "interleaved", once)
    part = Part("contention")
    with kernels.PagedKV(1, 2, shape.num_kv_heads, 64, shape.head_dim, "fp32") as pool:
        pool.fill_normal()
        fetch_beside_steps.measure(bench, part, pool, 64)
    told = {(row["rows"], row["case"], row["beside"]) for row in part.rows}
    assert told == {(rows, "row_fetch", beside) for rows in (1, 2) for beside in ("", "step")}
    assert all(row["samples"] == 3 * 6 for row in part.rows)
    assert len(part.values[0].x) == 2
