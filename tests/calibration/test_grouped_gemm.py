"""The experts' part on a model with a handful of them, and what the cost model makes of its numbers."""

import json
import math

import pytest
import torch

from calibration.bench import Bench
from calibration.parts import grouped_gemm
from calibration.timing import Plan
from herald_pipeline import catalogue
from herald_pipeline.model import KVDtype

EXPERTS, PER_TOKEN = 8, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "norm_topk_prob": True,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return catalogue.resolve(path)


def bench(shape):
    plan = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)
    made = Bench(shape, torch.device("cpu"), torch.float32, plan, KVDtype.FP32, KVDtype.FP32, quick=True)
    # So high that no share is cut off at 1.
    made.found["machine.gpu.peak_tflop_s"] = 1.0
    return made


@pytest.fixture(scope="module")
def part(shape):
    return grouped_gemm.measure(bench(shape))


def test_a_token_hits_as_many_experts_as_it_is_routed_to_and_many_tokens_hit_all(part):
    hits = [row["experts_hit"] for row in part.rows]
    assert hits[0] == PER_TOKEN
    assert hits[-1] == EXPERTS


def test_the_share_gives_back_the_time_that_was_measured(part):
    """As the cost model does: FLOPs with half a tile of padding for each expert hit, over the share of the peak."""
    values = {value.path: value for value in part.values}
    tile = values["engine.grouped_gemm_tile_rows"].y
    shares = values["engine.grouped_gemm_efficiency"]
    flops_of_row = 2.0 * 3 * 64 * 32
    for row, share, rows in zip(part.rows, shares.y, shares.x, strict=True):
        computed = flops_of_row * (rows * PER_TOKEN + row["experts_hit"] * tile / 2)
        assert computed / (share * 1e12) == pytest.approx(row["seconds"], rel=1e-9)


def test_random_tokens_route_as_independently_as_they_can():
    """With n independent tokens an expert is missed with (1 - k/E)^n."""
    independent = {n: round(EXPERTS * (1 - (1 - PER_TOKEN / EXPERTS) ** n)) for n in (2, 4)}
    assert grouped_gemm.routed_share(independent, EXPERTS, PER_TOKEN) == pytest.approx(1.0, abs=0.25)


def test_tokens_that_all_route_alike_count_as_one():
    share = grouped_gemm.routed_share({64: PER_TOKEN}, EXPERTS, PER_TOKEN)
    assert share == pytest.approx(1 / 64, rel=1e-6)
    assert math.isfinite(share)


def test_a_dense_model_has_no_such_numbers():
    found = grouped_gemm.measure(bench(catalogue.get("tiny")))
    assert (found.values, found.rows) == ([], [])
