"""The sliding window's demand against HERALD's and against hand arithmetic: llada2-mini moves 2,048 bytes an entry."""

import pytest

from herald_pipeline import catalogue, validate
from herald_pipeline.demand import demand
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import build
from herald_pipeline.pools import RequestSize
from herald_pipeline.stages import Mode, OpKind, RowGroup, launch_shape

ROWS, S, K, R = 80, 32768, 1638, 32
ENTRY, LAYERS, EXACT = 2048, 20, 2
SIZE = RequestSize(tokens=S + 256, selected_tokens=K, block_length=R)


def describe(method="herald-sliding", **settings):
    return build(catalogue.get("llada2-mini"), method, **settings)


def shape(mode=Mode.DENOISE, period=R):
    group = RowGroup(tuple(range(ROWS)), (1,) * ROWS, mode, ROWS * S, ROWS * K, ROWS * period)
    return launch_shape((group,), period)


def ops(pipeline, stage, kind, of, layer=None):
    return [op for repeat in pipeline.stage(stage).work(of, layer) for op in repeat.ops if op.kind is kind]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_window_of_one_period_is_herald(mode):
    sliding, herald = describe(window_blocks=1), describe("herald")
    assert [stage.name for stage in sliding.template.stages()] == [stage.name for stage in herald.template.stages()]
    for one, other in zip(sliding.template.stages(), herald.template.stages(), strict=True):
        for layer in one.layers[:3] or (None,):
            assert one.work(shape(mode), layer) == other.work(shape(mode), layer), one.name
    for one, other in zip(sliding.pools, herald.pools, strict=True):
        assert one.bytes_per_request(SIZE) == other.bytes_per_request(SIZE), one.name


def test_every_forward_computes_the_window():
    (qkv, *_) = ops(describe(window_blocks=3), "denoise", OpKind.QKV, shape())
    assert qkv.tokens == ROWS * 3 * R
    (drafting, *_) = ops(describe(window_blocks=3), "denoise", OpKind.QKV, shape(Mode.DRAFT))
    assert drafting.tokens == ROWS * 2 * 3 * R


def test_the_lm_head_runs_on_the_window_and_beside_a_completed_period_on_the_rest_of_it():
    pipeline = describe(window_blocks=3)
    (head,) = ops(pipeline, "denoise", OpKind.HEAD, shape())
    assert head.tokens == ROWS * 3 * R
    (completing,) = ops(pipeline, "denoise", OpKind.HEAD, shape(Mode.COMPLETE))
    assert completing.tokens == ROWS * 2 * R
    assert ops(describe(window_blocks=1), "denoise", OpKind.HEAD, shape(Mode.COMPLETE)) == []


def test_each_query_of_the_window_sees_the_selected_entries_the_tail_and_the_window():
    attention = ops(describe(window_blocks=2), "denoise", OpKind.ATTENTION, shape())[-1]
    pairs = ROWS * 2 * R * (K + R + 2 * R)
    assert attention.gpu_flops == 4 * pairs * 16 * 128


def test_the_draft_is_the_window_and_only_a_period_is_appended():
    pipeline = describe(window_blocks=2)
    assert demand(pipeline.stage("draft_down").work(shape(), None)).d2h_bytes == ROWS * 2 * R * LAYERS * ENTRY
    assert demand(pipeline.stage("append").work(shape(), None)).d2h_bytes == ROWS * R * LAYERS * ENTRY
    (select,) = ops(pipeline, "select", OpKind.SELECT, shape(), 3)
    assert select.dram_bytes == ROWS * (S + 2 * R) * ENTRY
    assert select.queries == 1


def test_a_shorter_stride_scans_the_prefix_more_often_a_token():
    # The window stays 32 tokens: its forwards cost the same, its scans twice as much a token.
    long, short = describe(window_blocks=1), describe(window_blocks=2, block_length=16)
    scans = [
        ops(pipeline, "select", OpKind.SELECT, shape(period=period), 3)[0].dram_bytes / period
        for pipeline, period in ((long, 32), (short, 16))
    ]
    assert scans[1] == 2 * scans[0]
    forwards = [
        ops(pipeline, "denoise", OpKind.QKV, shape(period=period))[0].tokens
        for pipeline, period in ((long, 32), (short, 16))
    ]
    assert forwards[0] == forwards[1]


def test_pools_hold_the_windows_further_positions():
    sliding, herald = describe(window_blocks=3), describe("herald")
    grown = {
        pool.name: pool.bytes_per_request(SIZE) - herald.pool(pool.name).bytes_per_request(SIZE)
        for pool in sliding.pools
    }
    further = 2 * R * ENTRY
    assert {name: size for name, size in grown.items() if size} == {
        "exact": further * EXACT,
        "sparse": further * (LAYERS - EXACT),
        "draft_out": further * LAYERS,
        "draft": further * LAYERS,
    }


@pytest.mark.parametrize("settings", [{}, {"window_blocks": 4}, {"block_length": 4, "window_blocks": 2}])
def test_windows_of_any_length_are_free_of_hazards(small_model: ModelShape, settings):
    validate.check(build(small_model, "herald-sliding", **settings))


@pytest.mark.parametrize("blocks", [0, 65, 1.5, float("nan")])
def test_a_window_that_is_no_count_of_periods_is_refused(blocks):
    with pytest.raises(ConfigError, match="window_blocks must be"):
        describe(window_blocks=blocks)


def test_it_says_that_it_is_ours_and_it_runs():
    method = describe().method
    assert not method.simulated_only
    assert any("in neither paper" in text for text in method.assumptions)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"block_length": 8, "window_blocks": 4}, 24),
        ({"block_length": 8, "window_blocks": 4, "queries": 32}, 8),
        ({"block_length": 16, "window_blocks": 2}, 32),
        ({"window_blocks": 2}, 64),
        ({"window_blocks": 1}, 32),
    ],
)
def test_a_selection_reads_the_draft_up_to_its_first_query(settings, tokens):
    pipeline = describe(**settings)
    (select,) = ops(pipeline, "select", OpKind.SELECT, shape(period=settings.get("block_length", R)), layer=2)
    assert select.dram_bytes == ROWS * (S + tokens) * ENTRY


def test_as_many_queries_as_the_window_has_positions_may_ask():
    assert describe(block_length=8, window_blocks=4, queries=32).settings.queries == 32
    with pytest.raises(ConfigError, match="queries must be <= block_length x window_blocks, got 33 > 32"):
        describe(block_length=8, window_blocks=4, queries=33)
