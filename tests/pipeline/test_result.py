"""The recorder: figures by hand arithmetic from a handful of launches."""

import json

import pytest

from herald_pipeline.pipeline import Pipeline
from herald_pipeline.result import Recorder
from herald_pipeline.scheduling.launches import Launch
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.stages import Mode, RowGroup, launch_shape


def launch(pipeline: Pipeline, name: str, block: int, layer: int | None = None, number: int = 0) -> Launch:
    group = RowGroup((0, 1), (block, block), Mode.DENOISE, 128, 6, 0)
    return Launch(number, pipeline.stage(name), layer, (group,), launch_shape((group,), 32), (), block, 0)


def two_blocks(pipeline: Pipeline) -> Recorder:
    """Two blocks of two forwards of 10 ns; in the second, main waits 6 ns at the swap: 4 for select, 2 for upload."""
    recorder = Recorder("simulated")
    clock = 0
    for block in range(2):
        for _ in range(2):
            step = launch(pipeline, "denoise", block)
            recorder.record(step, clock, clock + 10)
            recorder.step(step)
            clock += 10
        if block:
            recorder.record(launch(pipeline, "select", block, 2), clock - 10, clock + 4)
            recorder.record(launch(pipeline, "upload", block, 2), clock + 4, clock + 6)
            clock += 6
        recorder.record(launch(pipeline, "swap", block), clock, clock)
        recorder.block_done(clock, rows=2, tokens=64)
    return recorder


def test_throughput_is_of_the_window_after_the_first_block(herald: Pipeline) -> None:
    result = two_blocks(herald).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.throughput_tok_s == pytest.approx(64 / 26e-9)
    assert result.block_time_s == pytest.approx(26e-9)
    assert result.first_block_time_s == pytest.approx(20e-9)


def test_stall_and_exposed_transfer_are_told_apart(herald: Pipeline) -> None:
    result = two_blocks(herald).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.stall_s == pytest.approx(6e-9)
    assert result.exposed_transfer_s == pytest.approx(2e-9)


def test_main_and_retrieval_times_are_those_of_fig_14(herald: Pipeline) -> None:
    result = two_blocks(herald).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.main_time_s == pytest.approx(20e-9)
    assert result.retrieval_time_s == pytest.approx(16e-9)


def test_forwards_count_rows(herald: Pipeline) -> None:
    result = two_blocks(herald).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.forwards == 4
    assert result.forwards_per_block == 2
    assert result.tokens_per_forward == 16


def test_a_single_block_has_no_rates_and_is_valid_json(herald: Pipeline) -> None:
    recorder = Recorder("measured")
    recorder.block_done(0, rows=1, tokens=32)
    values = recorder.result(batch=1, budget=0.05, finished=1, rejected={3: "too large"}).to_dict()
    text = json.dumps(values, allow_nan=False)
    assert "throughput_tok_s" not in values
    assert json.loads(text)["rejected"] == {"3": "too large"}


def blocks_of(pipeline: Pipeline, durations: list[int], select_ns: int = 0) -> Recorder:
    """One forward a block; in all but the last block a selection of ``select_ns`` runs beside it."""
    recorder = Recorder("simulated")
    clock = 0
    for block, duration in enumerate(durations):
        step = launch(pipeline, "denoise", block)
        if select_ns and block + 1 < len(durations):
            recorder.record(launch(pipeline, "select", block, 2), clock, clock + select_ns)
        clock += duration
        recorder.record(step, clock - duration, clock)
        recorder.step(step)
        recorder.block_done(clock, rows=2, tokens=64)
    return recorder


def test_a_long_runs_window_begins_after_its_second_block(herald: Pipeline) -> None:
    result = blocks_of(herald, [50, 40, 10, 10, 10, 10]).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.block_time_s == pytest.approx(10e-9)
    assert result.main_time_s == pytest.approx(10e-9)
    assert result.throughput_tok_s == pytest.approx(64 / 10e-9)
    assert result.stages["denoise"]["count"] == 4


def test_a_short_runs_window_begins_after_its_first_block(herald: Pipeline) -> None:
    result = blocks_of(herald, [50, 40, 10, 10, 10]).result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.block_time_s == pytest.approx(17.5e-9)


def test_retrieval_time_is_that_of_a_pass_though_the_last_block_has_none(herald: Pipeline) -> None:
    recorder = blocks_of(herald, [20] * 8, select_ns=12)
    assert recorder.result(batch=2, budget=0.05, finished=2, rejected={}).retrieval_time_s == pytest.approx(12e-9)


def test_waiting_for_a_request_is_idle_time_and_no_part_of_a_block(herald: Pipeline) -> None:
    recorder = Recorder("simulated")
    clock = 0
    for block in range(3):
        if block == 2:
            clock += 900
            prompt = launch(herald, "prefill", -1, 0)
            recorder.record(prompt, clock, clock + 5)
            clock += 5
        recorder.record(launch(herald, "denoise", block), clock, clock + 10)
        clock += 10
        recorder.block_done(clock, rows=2, tokens=64)
    result = recorder.result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.idle_s == pytest.approx(900e-9)
    assert result.block_time_s == pytest.approx((10 + 5 + 10) / 2 * 1e-9)
    assert result.throughput_tok_s == pytest.approx(128 / 925e-9)


def test_rows_that_take_turns_have_blocks_as_long_as_a_rows_own(herald: Pipeline) -> None:
    recorder = Recorder("simulated", policy=BatchPolicy.FIRST_DONE_FIRST_OUT)
    for end in range(10, 90, 10):
        recorder.record(launch(herald, "denoise", 0), end - 10, end)
        recorder.block_done(end, rows=1, tokens=32)
    result = recorder.result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.block_time_s == pytest.approx(20e-9)
    assert result.main_time_s == pytest.approx(20e-9)


def test_halves_warm_up_for_as_many_blocks_of_the_batch_as_a_whole_one() -> None:
    """Six blocks are twelve completions; the first four of them, slow ones, lie before the window."""
    recorder, end = Recorder("simulated", policy=BatchPolicy.TWO_BATCH_OVERLAP), 0
    for completion in range(12):
        end += 100 if completion < 4 else 10
        recorder.block_done(end, rows=1, tokens=32)
    result = recorder.result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.block_time_s == pytest.approx(20e-9)
    assert result.throughput_tok_s == pytest.approx(32 / 10e-9)


def test_a_second_halfs_late_copies_do_not_make_another_pass(herald: Pipeline) -> None:
    """First half 0-10, second half 10-20 with an upload until 24, beside the next block's first half 20-30."""
    recorder = Recorder("simulated", policy=BatchPolicy.TWO_BATCH_OVERLAP)
    recorder.block_done(0, rows=1, tokens=32)
    recorder.block_done(0, rows=1, tokens=32)
    ran = [("select", 1, 0, 10), ("select", 1, 10, 20), ("select", 2, 20, 25), ("upload", 1, 21, 24)]
    for name, block, start, end in [*ran, ("select", 2, 25, 30)]:
        recorder.record(launch(herald, name, block, layer=2), start, end)
    recorder.block_done(30, rows=2, tokens=64)
    result = recorder.result(batch=2, budget=0.05, finished=2, rejected={})
    assert result.retrieval_time_s == pytest.approx((24 + 10) / 2 * 1e-9)


def test_where_kv_was_filled_in_nothing_is_said_of_a_prefill(herald: Pipeline) -> None:
    recorder = two_blocks(herald)
    recorder.record(launch(herald, "prefill", -1, 0), 60, 100)
    figures = {"batch": 2, "budget": 0.05, "finished": 2, "rejected": {}}
    filled = recorder.result(**figures, prefilled=False).to_dict()
    assert filled["fill_time_s"] == pytest.approx(40e-9)
    assert not {"prefill_time_s", "prefill_tok_s", "end_to_end_tok_s"} & set(filled)
    prefilled = recorder.result(**figures).to_dict()
    assert prefilled["prefill_tok_s"] == pytest.approx(128 / 40e-9)
    assert "fill_time_s" not in prefilled
