"""The DSB article's tables taken apart, against arithmetic on the printed numbers."""

import json

import pytest

from herald_sim.exhibits import dsb


def row(rows, **wanted):
    found = [r for r in rows if wanted.items() <= r.items()]
    assert len(found) == 1
    return found[0]


GSM8K = {"model": "LLaDA-8B-Instruct", "task": "GSM8K"}


def test_every_printed_throughput_has_a_row_and_all_are_derived():
    rows = dsb.main_table() + dsb.table_3()
    assert len(dsb.main_table()) == 55
    assert len(dsb.table_3()) == 8
    assert {r["set"] for r in rows} == {"derived"}


def test_a_full_forward_of_gsm8k_takes_67_ms():
    # 256 tokens at 14.94 tokens a second and one token a forward: 1 / 14.94 s.
    vanilla = row(dsb.main_table(), **GSM8K, decoder="Top-1")
    assert vanilla["full_forward_ms"] == pytest.approx(1000 / 14.94)
    assert vanilla["forwards"] == 256


def test_forwards_without_a_cache_are_time_over_a_full_forward():
    found = row(dsb.main_table(), **GSM8K, decoder="Confidence", scheduler="Naive", cache="None")
    assert found["forwards"] == pytest.approx(256 * 14.94 / 48.70)
    assert found["value"] is None


@pytest.mark.parametrize(
    ("scheduler", "cache", "tps", "plain_tps"),
    [
        ("Naive", "Dual", 92.26, 48.70),
        ("DSB(const)", "DSB Cache", 98.1, 50.36),
        ("DSB(greedy)", "DSB Cache", 99.61, 51.03),
    ],
)
def test_short_steps_of_gsm8k_are_30_to_32_ms_whatever_the_cache(scheduler, cache, tps, plain_tps):
    full = 1 / 14.94
    forwards = 256 * 14.94 / plain_tps
    by_hand = 1e3 * (256 / tps - 8 * full) / (forwards - 8)
    rows = dsb.main_table() if cache == "Dual" or scheduler == "DSB(greedy)" else dsb.table_3()
    found = row(rows, **GSM8K, scheduler=scheduler, cache=cache)
    assert found["short_step_ms"] == pytest.approx(by_hand)
    assert 30 < by_hand < 32


def test_rows_that_can_be_checked_agree_within_six_percent():
    errors = [r["error"] for r in dsb.main_table() + dsb.table_3() if r["error"] is not None]
    assert len(errors) == 8
    assert max(abs(error) for error in errors) < 0.06


def test_plain_dual_under_a_sliding_block_needs_a_fifth_more_forwards():
    for scheduler, plain in (("DSB(const)", 75.9), ("DSB(greedy)", 74.9)):
        found = row(dsb.table_3(), **GSM8K, scheduler=scheduler, cache="Dual")
        assert found["forwards"] / plain == pytest.approx(1.21, abs=0.03)


def test_more_forwards_than_tokens_are_called_inconsistent():
    notes = {(r["model"], r["task"]) for r in dsb.main_table() if r["note"].startswith("inconsistent")}
    assert notes == {("LLaDA-1.5", "HumanEval")}


def test_rows_with_two_unknowns_say_so_and_carry_no_number():
    found = row(dsb.main_table(), model="Dream-v0-Instruct-7B", task="BBH", cache="Dual")
    assert found["forwards"] is None
    assert found["value"] is None
    assert found["note"].startswith("not separable")


def test_the_two_equations_give_back_both_times():
    # f = 50 ms, N = 90, 8 refreshes, short 30 ms.
    full = dsb.solve_full_forward_s(90 * 0.05, 8 * 0.05 + 82 * 0.03, 0.03, 8)
    assert full == pytest.approx(0.05)
    assert dsb.solve_full_forward_s(10.0, 0.1, 0.03, 8) is None


def test_the_worked_example_differs_from_the_print_in_its_last_edge_only():
    rows = dsb.worked_example()
    assert [(r["quantity"], r["published"], r["value"]) for r in rows if r["error"]] == [("round3_e", 30, 31)]
    assert [r["value"] for r in rows] == [22, 27, 22, 28, 27, 31]


@pytest.mark.parametrize("name", dsb.EXHIBITS)
def test_every_exhibit_is_plain_json(name):
    assert json.loads(json.dumps(dsb.EXHIBITS[name](), allow_nan=False))
