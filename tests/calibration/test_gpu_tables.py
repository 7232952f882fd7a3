"""What the parts of a GPU read off tables of one another: no device needed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from calibration.bench import Bench, Part
from calibration.gpu import steps, top_k
from calibration.gpu.steps import Step, first_share, interpolated, routed
from calibration.timing import Plan, Timing
from herald_exec.models import tiny
from herald_pipeline import catalogue
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype, MoeShape


def test_tokens_that_all_route_alike_count_as_one_token_of_many():
    assert routed({64: 2.0}, 8, 2) == pytest.approx(1 / 64)


def test_tokens_that_reach_every_expert_say_nothing_of_how_alike_they_are():
    assert routed({64: 8.0}, 8, 2) == 1.0


def test_tables_are_read_in_the_logarithm_and_grow_in_proportion_beyond_their_end():
    table = {1.0: 1.0, 100.0: 3.0}
    assert interpolated(table, 10) == pytest.approx(2.0)
    assert interpolated(table, 200) == pytest.approx(6.0)


def test_a_block_s_first_step_is_shorter_by_its_experts_once_the_head_s_positions_are_counted():
    plan = Plan(1, 6, 0, 0.0, 1e6)
    bench = Bench(tiny().shape, torch.device("cpu"), torch.float32, plan, KVDtype.FP32, KVDtype.FP32, block_length=8)
    bench.shape = replace(bench.shape, moe=MoeShape(8, 2, 32, first_dense_layers=0, gate="sigmoid"))
    layers = bench.shape.num_moe_layers
    # Its head sees all 8 positions and takes 1 ms, the other steps' 4 of them take 0.5.
    bench.tables["head by positions"] = {4.0: 0.5e-3, 8.0: 1e-3}
    times = [Timing("", (seconds,) * 3, 1) for seconds in (10e-3, 10e-3 + 0.5e-3 - layers * 0.3e-3, 0.0)]
    step = Step(1, times[0], times[1], times[2], 0.5)
    assert first_share(bench, step, experts_s=1e-3) == pytest.approx(0.7)


def test_selecting_on_the_device_is_a_share_of_the_read_rate_over_the_bytes_of_a_requests_scores():
    shape = tiny().shape
    bench = Bench(
        shape,
        torch.device("cpu"),
        torch.float32,
        Plan(1, 6, 0, 0.0, 1e6),
        KVDtype.FP32,
        KVDtype.FP32,
        (0,),
        (0,),
        8,
        found={"machine.gpu.bandwidth_gb_s": 10.0},
    )
    part = Part("selection")
    top_k.measure(bench, part)
    (value,) = part.values
    first = part.rows[0]
    assert value.x[0] == 2 * 64 * shape.num_kv_heads * 4
    assert value.y[0] == pytest.approx(value.x[0] / first["seconds"] / 10e9)
    assert value.unit == specs(Engine)["top_k_efficiency"].unit


@pytest.mark.parametrize("model", ["llada2-mini", "sdar-8b"])
def test_the_kv_of_the_runs_that_time_steps_fits_a_device_of_80_gb_beside_the_weights(model):
    shape = catalogue.get(model)
    bench = SimpleNamespace(on_cuda=True, block_length=32, shape=shape)
    entries = max(steps.batches(bench)) * (steps.context(bench) + 5 * bench.block_length)
    assert entries * shape.kv_bytes_per_token("bf16") < 40e9
