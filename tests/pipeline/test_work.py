"""Demand of launches against hand arithmetic on the paper's numbers."""

import numpy as np
import pytest

from herald_pipeline import catalogue
from herald_pipeline.demand import demand
from herald_pipeline.errors import ConfigError
from herald_pipeline.pipeline import build
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Mode, RowGroup, launch_shape

S = 32768
K = 1638


def shape(rows: int = 80, mode: Mode = Mode.DENOISE, tail: int = 32):
    group = RowGroup(tuple(range(rows)), (1,) * rows, mode, rows * S, rows * K, rows * tail)
    return launch_shape((group,), 32)


def test_five_percent_of_32k_is_1638_entries() -> None:
    assert Settings(budget=0.05).selected_tokens(S) == K


@pytest.mark.parametrize(
    ("budget", "prefix", "selected"),
    [(0.05, 0, 0), (0.0, 100, 0), (0.001, 10, 1), (1.0, 77, 77), (3.0, 77, 77), (0.1, 10, 1), (0.29, 100, 29)],
)
def test_budget_rounds_down_but_never_to_nothing(budget: float, prefix: int, selected: int) -> None:
    assert Settings(budget=budget).selected_tokens(prefix) == selected


def test_selection_reads_each_layers_prefix_and_draft_once() -> None:
    """40,960 B a token in 20 layers: 2,048 B a layer; 80 rows of 32,768 entries and a draft of 32."""
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    total = demand(pipeline.stage("select").work(shape(), 2))
    assert total.dram_bytes == 80 * (S + 32) * 2048
    assert total.cpu_flops == 4 * 80 * (S + 32) * 16 * 128


def test_upload_moves_k_entries_a_layer_and_row() -> None:
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    assert demand(pipeline.stage("upload").work(shape(), 2)).h2d_bytes == 80 * K * 2048


def test_a_blocks_uploads_and_full_fetch_differ_by_the_budget() -> None:
    model = catalogue.get("llada2-mini")
    herald, mage = build(model, "herald"), build(model, "mage-offload", budget=0.05)
    up = demand(herald.stage("upload").work(shape(), 2)).h2d_bytes
    full = demand(mage.stage("fetch").work(shape(), 2)).h2d_bytes
    assert up / full == K / S


def test_dense_attention_reads_the_full_prefix_and_herald_k_and_tail() -> None:
    model = catalogue.get("sdar-8b")
    dense, herald = build(model, "dense"), build(model, "herald")
    full = demand(dense.stage("denoise").work(shape(8), None)).hbm_bytes
    part = demand(herald.stage("denoise").work(shape(8), None)).hbm_bytes
    layer = 2 * 8 * 128 * 2
    assert full - part == 34 * 8 * (S - K - 32) * layer


def test_the_draft_step_forwards_twice_the_tokens_but_decides_the_same_positions() -> None:
    draft = shape(mode=Mode.DRAFT)
    assert draft.tokens == 2 * shape().tokens
    assert draft.masked_tokens == shape().masked_tokens


def test_a_completing_forward_runs_no_head() -> None:
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    kinds = {op.kind for r in pipeline.stage("denoise").work(shape(mode=Mode.COMPLETE), None) for op in r.ops}
    assert not kinds & {"head", "sample"}


def test_step_layers_add_up() -> None:
    model = catalogue.get("llada2-mini")
    work = build(model, "herald").stage("denoise").work(shape(), None)
    per_layer = [repeat for repeat in work if any(op.kind == "qkv" for op in repeat.ops)]
    assert sum(repeat.count for repeat in per_layer) == model.num_layers
    assert [repeat.count for repeat in per_layer] == [1, 1, 18]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": float("nan")}, "budget must be finite"),
        ({"budget": -0.1}, "budget must be >= 0"),
        ({"block_length": 0}, "block_length must be >= 1"),
        ({"queries": 33}, "queries must be <= block_length, got 33 > 32"),
        ({"kv_buget": 1}, "unknown method setting 'kv_buget'"),
        ({"gather": "fuse"}, "gather must be one of cpu, fused, gpu, got 'fuse'; did you mean 'fused'"),
        ({"exact_layers_on": "tpu"}, "exact_layers_on must be 'cpu' or 'gpu'"),
        ({"kv_dtype": "bf61"}, "kv_dtype 'bf61' is not a KV format; did you mean 'bf16'"),
    ],
)
def test_settings_that_break_a_rule_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings().replace(**change)


def test_work_of_a_step_leaves_a_shape_of_arrays_as_it_is() -> None:
    """Fast mode asks for all blocks at once; a run of layers must not count what the run before it added."""
    pairs = np.array([80 * 32 * S, 80 * 32 * (S + 32)])
    arrays = shape()._replace(prefix_pairs=pairs.copy())
    first, second, *rest = build(catalogue.get("llada2-mini"), "herald").stage("denoise").work(arrays, None)
    assert rest
    assert (arrays.prefix_pairs == pairs).all()
    assert (first.ops[1].gpu_flops == second.ops[1].gpu_flops).all()
