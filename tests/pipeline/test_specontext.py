"""SpeContext's times and volumes against hand arithmetic: llada2-mini moves 2,048 bytes an entry and layer."""

import pytest

from herald_pipeline import capacity, catalogue, validate
from herald_pipeline.capacity import Memory
from herald_pipeline.demand import demand
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Mode, OpKind, RowGroup, launch_shape

ROWS, S, K, B = 80, 32768, 1638, 32
ENTRY = 2048


def describe(**settings):
    return build(catalogue.get("llada2-mini"), "specontext", **settings)


def shape():
    return launch_shape((RowGroup(tuple(range(ROWS)), (1,) * ROWS, Mode.DENOISE, ROWS * S, ROWS * K, 0),), B)


@pytest.mark.parametrize(("overlap", "new"), [(0.0, 1.0), (0.75, 0.25), (1.0, 0.0)])
def test_only_the_new_part_of_a_selection_is_gathered_and_sent(overlap, new):
    pipeline = describe(selection_overlap=overlap)
    gathered, sent = (demand(pipeline.stage(name).work(shape(), 3)) for name in ("gather", "upload"))
    assert sent.h2d_bytes == ROWS * K * ENTRY * new
    assert gathered.dram_bytes == ROWS * K * 2 * ENTRY * new


def test_the_retrieval_model_costs_its_fraction_of_the_main_models_active_parameters():
    pipeline = describe(retrieval_fraction=0.05)
    params = 0.05 * pipeline.model.active_params
    (matrix,) = _ops(pipeline, "retrieve", OpKind.QKV)
    assert matrix.gpu_flops == pytest.approx(2 * ROWS * B * params)
    assert matrix.weight_bytes == pytest.approx(2 * params)


def test_it_scores_one_layers_keys_for_all_layers():
    (scores,) = _ops(describe(), "retrieve", OpKind.PROXY)
    assert scores.hbm_bytes == ROWS * S * ENTRY / 2
    assert scores.gpu_flops == 2 * ROWS * B * S * 16 * 128


def _ops(pipeline, stage, kind):
    return [op for repeat in pipeline.stage(stage).work(shape(), None) for op in repeat.ops if op.kind is kind]


def test_fetches_run_ahead_of_the_layers_that_use_them(small_model: ModelShape):
    """The gather of layer 1 waits for no attention; that of the first layer for the picked positions alone."""
    launches = validate.issue(build(small_model, "specontext"), (2,), BatchPolicy.LOCKSTEP)
    first = {(launch.stage.name, launch.layer): launch for launch in launches if launch.block == 0}
    attends = {launch.id for (name, _), launch in first.items() if name == "select_step"}
    assert first["retrieve", None].id in first["gather", 0].after
    for layer in range(small_model.num_layers):
        assert not attends & {*first["gather", layer].after, *first["upload", layer].after}
        assert first["upload", layer].id in first["select_step", layer].after


def test_the_retrieval_models_weights_are_held_once_whatever_the_batch():
    pipeline = describe()
    memory = Memory(1e12, 1e12, 1e12)
    held = [
        next(
            item.num_bytes for item in capacity.budget(pipeline, S, n, memory).items if item.name == "retrieval_weights"
        )
        for n in (1, 80)
    ]
    assert held == [pytest.approx(0.1 * pipeline.model.active_params * 2)] * 2


def test_weights_are_no_part_of_a_requests_kv():
    small, large = (
        capacity.budget(describe(retrieval_fraction=f), S, 8, Memory(1e12, 1e12, 1e12)).kv_bytes_per_request
        for f in (0.01, 0.5)
    )
    assert small == large


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selection_overlap": -0.1}, "selection_overlap must be >= 0"),
        ({"selection_overlap": 1.01}, "selection_overlap must be <= 1"),
        ({"selection_overlap": float("nan")}, "selection_overlap must be finite"),
        ({"retrieval_fraction": 0.0}, "retrieval_fraction must be > 0"),
        ({"retrieval_fraction": 1.5}, "retrieval_fraction must be <= 1"),
    ],
)
def test_shares_outside_their_borders_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**change)


def test_exact_layers_are_refused(small_model: ModelShape):
    with pytest.raises(ConfigError, match="exact_layers must be 0 for specontext, got 1"):
        build(small_model, "specontext", exact_layers=1)


def test_it_says_what_it_assumes_and_that_it_only_simulates():
    method = describe().method
    assert method.simulated_only
    assert any("selection_overlap" in text for text in method.assumptions)
    assert any("retrieval_fraction" in text for text in method.assumptions)
