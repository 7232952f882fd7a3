"""Parts as they run on a GPU, on one: not for their numbers, for what they take apart and write."""

import warnings
from dataclasses import replace

import pytest
import torch

from calibration import parts
from calibration.bench import Bench
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline import hardware_io
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype, MoeShape

# In Triton's interpreter these parts take more than five minutes.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)
MOE = MoeShape(8, 2, 32, num_shared_experts=1, num_groups=2, groups_per_token=1, first_dense_layers=1, gate="sigmoid")


@pytest.fixture(scope="module")
def measured():
    """Every part that has its own way on a GPU, in the order of a measurement."""
    shape = replace(tiny().shape, moe=MOE, block_length=8)
    bench = Bench(
        shape,
        torch.device("cuda"),
        torch.bfloat16,
        FAST,
        KVDtype.BF16,
        KVDtype.BF16,
        (),
        (0,),
        8,
        quick=True,
        fused=True,
    )
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("memory", "dram", "attention", "gemm", "sampler", "copies", "selection", "gather", "proxy"):
            found[name] = parts.get(name)(bench)
            for value in found[name].values:
                bench.found[value.path] = float(value.y if isinstance(value.y, float | int) else max(value.y))
        # Of a tiny model launches are all, so what a step leaves to its experts could come out below nothing.
        bench.tables["products of a layer"] = dict.fromkeys(bench.tables["products of a layer"], 1e-9)
        bench.tables["layer overhead"] = {1.0: 0.0}
        bench.tables["acceptance of a step"] = {1.0: 0.0}
        bench.tables["head by positions"] = dict.fromkeys(bench.tables["head by positions"], 1e-9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("calibration.gpu.attention.seconds", lambda *_: 1e-9)
            # What an exchange is compared with is no matter here, nor how long a load lasts.
            known = hardware_io.resolve("h200-141g_emr-16vcpu-3")
            patch.setattr("calibration.exchange.without_overheads", lambda *_: known)
            patch.setattr("calibration.gpu.load.LOAD_S", 0.2)
            patch.setattr("calibration.gpu.load.REST_S", 0.1)
            patch.setattr("calibration.gpu.load.sizes", lambda _: ((4, 1024), (16, 1024)))
            patch.setattr("calibration.gpu.fetching_steps.context", lambda _: 1024)
            patch.setattr("calibration.gpu.load.sparse_sizes", lambda _: ((16, 1024),))
            for name in ("grouped-gemm", "launch", "load", "contention"):
                found[name] = parts.get(name)(bench)
    return found


@pytest.mark.timeout(300)
def test_every_number_of_the_engine_is_found_with_its_unit(measured):
    units = {name: spec.unit for name, spec in specs(Engine).items()}
    values = [v for part in measured.values() for v in part.values if v.path.startswith("engine.")]
    assert {v.path.removeprefix("engine.") for v in values} >= {
        "attention_efficiency", "gemm_efficiency", "weight_read_efficiency", "layer_overhead_us", "sampler_passes",
        "grouped_gemm_efficiency", "routed_token_share", "decide_overhead_us", "head_token_share",
        "retrieval_layer_overhead_us", "d2h_overhead_us", "kernels_per_layer", "proxy_efficiency", "turn_wait_share",
        "exchange_project_us", "exchange_finish_us", "scattered_copy_efficiency", "constant_load_efficiency",
        "constant_load_efficiency_sparse",
        "gather_beside_scan", "copy_beside_scan", "row_fetch_beside_scan", "down_beside_scan",
        "step_beside_row_fetch", "proxy_beside_row_fetch", "row_fetch_beside_step", "acceptance_us",
        "first_step_experts_share",
    }  # fmt: skip
    for value in values:
        assert value.unit == units[value.path.removeprefix("engine.")]


def test_shares_are_shares(measured):
    for part in measured.values():
        for value in part.values:
            if value.unit == "share":
                ys = value.y if isinstance(value.y, tuple) else (value.y,)
                assert all(0 < y <= 1 for y in ys), value


def test_the_head_sees_on_average_half_of_the_positions_of_a_block(measured):
    (share,) = (v.y for v in measured["launch"].values if v.path == "engine.head_token_share")
    # Eight steps of one token each: 8, 7, .. 1 of 8 positions are masked.
    assert share == pytest.approx(36 / 64)


def test_nothing_is_faster_for_what_runs_beside_it(measured):
    factors = [v for v in measured["contention"].values if v.path.endswith("_beside_scan")]
    assert len(factors) == 4
    assert all(y >= 1 for value in factors for y in value.y)


def test_copies_to_the_host_cost_more_for_more_requests(measured):
    (overhead,) = (v for v in measured["launch"].values if v.path == "engine.d2h_overhead_us")
    assert overhead.x[0] < overhead.x[-1]
    assert overhead.y[0] < overhead.y[-1]
