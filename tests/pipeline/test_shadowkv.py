"""ShadowKV's description against hand arithmetic: llada2-mini has 4 KV heads of 128, 512 elements of joined keys."""

import pytest

from herald_pipeline import capacity, catalogue, validate
from herald_pipeline.demand import demand
from herald_pipeline.errors import ConfigError
from herald_pipeline.methods import shadowkv
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.stages import Mode, OpKind, RowGroup, launch_shape

ROWS, S, K, B = 80, 32768, 1638, 32
KEYS = 512 * 2
"""Bytes of one position's keys in one layer, bf16; values take as many."""


@pytest.fixture(scope="module")
def pipeline():
    return build(catalogue.get("llada2-mini"), "shadowkv")


def shape(mode=Mode.DENOISE):
    return launch_shape((RowGroup(tuple(range(ROWS)), (1,) * ROWS, mode, ROWS * S, ROWS * K, 0),), B)


def ops(pipeline, stage, kind):
    work = pipeline.stage(stage).work(shape(), 3)
    return [op for repeat in work for op in repeat.ops if op.kind is kind]


def test_only_values_cross_the_link(pipeline):
    moved = {name: demand(pipeline.stage(name).work(shape(), 3)) for name in ("upload", "offload", "append")}
    assert moved["upload"].h2d_bytes == ROWS * K * KEYS
    assert moved["offload"].d2h_bytes == ROWS * S * KEYS
    assert moved["append"].d2h_bytes == ROWS * B * KEYS * 20


def test_a_block_fetches_half_of_what_infinigen_does_at_the_same_budget(pipeline):
    infinigen = build(pipeline.model, "infinigen", budget=0.05)
    ours, theirs = (demand(p.stage(n).work(shape(), 3)) for p, n in ((pipeline, "upload"), (infinigen, "fetch")))
    assert ours.h2d_bytes * 2 == theirs.h2d_bytes


def test_gather_reads_and_writes_each_picked_value_once(pipeline):
    assert demand(pipeline.stage("gather").work(shape(), 3)).dram_bytes == ROWS * K * 2 * KEYS


def test_scores_read_one_landmark_for_eight_keys(pipeline):
    (scores,), (top,) = (ops(pipeline, "score", kind) for kind in (OpKind.PROXY, OpKind.TOP_K))
    assert scores.hbm_bytes == ROWS * S // 8 * KEYS
    assert scores.gpu_flops == 2 * ROWS * B * (S // 8) * 16 * 128
    assert top.hbm_bytes == 2 * ROWS * (S // 8) * 4 * 4


def test_rebuilding_reads_160_coefficients_for_each_head_and_entry(pipeline):
    (rebuilt,) = ops(pipeline, "rebuild", OpKind.REBUILD)
    assert rebuilt.gpu_flops == 2 * ROWS * K * 160 * 512
    assert rebuilt.hbm_bytes == ROWS * (K * 4 * 160 * 2 + 160 * 512 * 2 + K * KEYS)


def test_a_model_with_narrow_keys_keeps_them_at_full_rank(small_model: ModelShape):
    """Two KV heads of 16: 32 coefficients, not 160."""
    (rebuilt,) = ops(build(small_model, "shadowkv"), "rebuild", OpKind.REBUILD)
    assert rebuilt.gpu_flops == 2 * ROWS * K * 32 * 32


def test_a_layer_projects_its_tokens_once_and_attends_to_the_picked_entries(pipeline):
    assert len(ops(pipeline, "score", OpKind.QKV)) == 1
    assert ops(pipeline, "select_step", OpKind.QKV) == []
    (attention,) = ops(pipeline, "select_step", OpKind.ATTENTION)
    assert attention.hbm_bytes == ROWS * (K + B) * 2 * KEYS


def test_the_device_holds_coefficients_landmarks_and_whole_keys(pipeline):
    size = capacity.RequestSize(S, K, B)
    held = {pool.name: pool.bytes_per_request(size) for pool in pipeline.pools}
    whole = K * 8 * 24 / 1024 + 5 * 8
    assert held["shadow"] == pytest.approx(20 * (S * 160 * 2 + S / 8 * KEYS + whole * KEYS + 160 * 512 * 2))
    assert held["values"] == 20 * S * KEYS
    # Keys at rank 160 of 512 and landmarks: under half of the keys, under a quarter of the KV.
    assert held["shadow"] < 0.25 * 20 * S * 2 * KEYS


def test_outlier_chunks_grow_with_the_budget():
    assert [shadowkv.outlier_chunks(k) for k in (0, 42, 43, 1024, 2048)] == [0, 0, 1, 24, 48]


def test_keys_are_rebuilt_while_their_values_come(small_model: ModelShape):
    """Neither waits for the other; attention waits for both (one by its stream)."""
    launches = validate.issue(build(small_model, "shadowkv"), (2,), BatchPolicy.LOCKSTEP)
    first = {(launch.stage.name, launch.layer): launch for launch in launches if launch.block == 0}
    upload, rebuild, attend = (first[name, 1] for name in ("upload", "rebuild", "select_step"))
    assert upload.id not in rebuild.after
    assert rebuild.id not in upload.after
    assert upload.id in attend.after
    assert attend.stage.stream == rebuild.stage.stream


def test_exact_layers_are_refused(small_model: ModelShape):
    with pytest.raises(ConfigError, match="exact_layers must be 0 for shadowkv, got 2"):
        build(small_model, "shadowkv", exact_layers=2)
