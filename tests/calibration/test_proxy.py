"""The proxy, timed in short decodes."""

import pytest
import torch

from calibration import parts
from calibration.bench import Bench, divide_cores
from calibration.timing import Plan
from herald_exec.models import tiny
from herald_pipeline.hardware import Engine, specs
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import build
from herald_pipeline.stages import LaunchShape, OpKind


@pytest.fixture(scope="module")
def measured():
    main, retrieval = divide_cores(torch.device("cpu"))
    bench = Bench(
        tiny().shape,
        torch.device("cpu"),
        torch.float32,
        Plan(1, 6, 0, 0.0, 1e6),
        KVDtype.FP32,
        KVDtype.FP32,
        main,
        retrieval,
        8,
        quick=True,
        found={"machine.gpu.bandwidth_gb_s": 10.0},
    )
    return parts.get("proxy")(bench)


def test_its_share_is_that_of_the_bytes_by_which_the_description_prices_it(measured):
    pipeline = build(tiny().shape, "infinigen", block_length=8, kv_dtype="fp32", dram_kv_dtype="fp32", queries=8)
    shape = LaunchShape(2, 16, 16, 2 * 256, 2 * 51, 0, 16 * 256, 16 * 51)
    (op,) = (op for repeat in pipeline.stage("proxy").work(shape, 1) for op in repeat.ops if op.kind is OpKind.PROXY)
    row = measured.rows[-1]
    assert (row["rows"], row["context"]) == (2, 256)
    assert row["bytes"] == pytest.approx(op.hbm_bytes)
    assert measured.values[0].y[-1] == pytest.approx(op.hbm_bytes / row["seconds"] / 10e9)


def test_it_is_a_curve_of_the_engine_with_its_unit(measured):
    (value,) = measured.values
    assert value.unit == specs(Engine)[value.path.removeprefix("engine.")].unit
    assert all(0 < y <= 1 for y in value.y)


def test_the_first_layer_which_begins_a_step_and_the_first_block_are_left_out(measured):
    counted_blocks, counted_layers = 7, min(3, tiny().shape.num_layers) - 1
    samples = {row["case"]: row["samples"] for row in measured.rows}
    assert samples == {"proxy": counted_blocks * counted_layers, "acceptance": counted_blocks}
