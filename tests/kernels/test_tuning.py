"""Tuning: names, limits, and that it never changes what is found."""

import numpy as np
import pytest

from herald_exec import kernels
from herald_exec.kernels import choosing
from herald_exec.kernels.checking import TUNINGS
from herald_exec.kernels.measuring import KernelBench
from herald_exec.kernels.tuning import USES, parse_tuning, use_of
from herald_pipeline.errors import ConfigError


def test_changes_are_read_from_text():
    base = kernels.Tuning(distance=4)
    found = parse_tuning("streams=4,even,tiles=0", base)
    assert found == kernels.Tuning(distance=4, streams=4, even=True)
    assert parse_tuning("", base) == base


@pytest.mark.parametrize(
    ("text", "message"), [("distanze=2", "did you mean 'distance'"), ("distance=far", "whole number, got 'far'")]
)
def test_a_bad_text_is_named(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_tuning(text, kernels.Tuning())


@pytest.mark.parametrize("change", [{"distance": -1}, {"distance": 129}, {"streams": 0}, {"rows_ahead": 257}])
def test_a_number_out_of_range_is_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        kernels.Tuning(**change)


def test_an_unknown_cache_level_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        kernels.GatherTuning(level="frist")


@pytest.mark.parametrize("x", [1, 8])
def test_prefetch_and_order_leave_every_bit_as_it_is(tier, x):
    pool = kernels.PagedKV(1, 2, 2, 3000, 128)
    pool.fill_normal(5)
    queries = np.random.default_rng(1).standard_normal((2, x, 8, 128)).astype(np.float32)

    def found(tuning):
        options = kernels.SelectOptions(tuning=tuning, keep_importance=True)
        got = kernels.select(pool, 0, [0, 1], [3000, 777], queries, [150, 40], options=options)
        assert got.importance is not None
        return got.output.tobytes() + got.importance.tobytes()

    expected = found(kernels.Tuning())
    assert all(found(tuning) == expected for tuning in TUNINGS if not tuning.tiles)


@pytest.mark.parametrize("kind", ["key_only", "keys8", "rescore_all"])
@pytest.mark.parametrize("threads", [1, 2])
def test_how_single_rows_are_asked_for_leaves_every_bit_as_it_is(tier, kind, threads):
    """Heads of one chunk, of several, and none; an infinite key, whose tile is scored in another way."""
    lengths = np.array([6000, 4100, 0, 4100, 70, 2048])
    pool = kernels.PagedKV(1, 6, 1, 6000, 128)
    pool.fill_normal(3)
    pool.pages[0, 1, :, 0, 0, 3, 5] = 0x7F80
    keys = kernels.Int8Keys(pool)
    for slot, length in enumerate(lengths):
        keys.update(0, slot, 0, int(length))
    queries = np.random.default_rng(2).standard_normal((6, 1, 4, 128)).astype(np.float32)

    def found(threads, **changes):
        options = kernels.SelectOptions(
            tuning=kernels.Tuning(**changes),
            key_only=kind == "key_only",
            rescore_all=kind == "rescore_all",
            keep_importance=True,
        )
        used = keys if kind != "key_only" else None
        got = kernels.select(
            pool, 0, range(6), lengths, queries, lengths // 20, keys8=used, options=options, threads=threads
        )
        return [part.tobytes() for part in (got.output, got.indices, got.counts, got.status, got.importance)]

    expected = found(1)
    assert found(threads, distance=4) == expected
    assert found(threads, rows_ahead=0, streams=4, distance=4, even=True) == expected


def test_every_way_of_gathering_copies_the_same(tier):
    pool = kernels.PagedKV(1, 1, 2, 1000, 64)
    pool.fill_normal(5)
    queries = np.ones((1, 1, 4, 64), np.float32)
    selection = kernels.select(pool, 0, [0], [1000], queries, [300])
    expected = None
    for tuning in (
        kernels.GatherTuning(ahead=0),
        kernels.GatherTuning(level="second", scattered=True),
        kernels.GatherTuning(ahead=256, level="once", streaming=False),
    ):
        out = [np.zeros((1, 2, 300, 64), np.uint16) for _ in range(2)]
        kernels.gather(pool, 0, [0], selection, *out, tuning=tuning)
        found = out[0].tobytes() + out[1].tobytes()
        assert expected in (None, found)
        expected = found


@pytest.mark.parametrize(
    ("rows", "options", "use"),
    [
        (4, {}, "scan"),
        (5, {}, "wide_scan"),
        (15, {}, "wide_scan"),
        (16, {}, "matrix"),
        (4, {"key_only": True}, "keys"),
        (16, {"key_only": True}, "matrix"),
        (128, {"keys8": True}, "keys8"),
    ],
)
def test_the_use_of_a_scan_follows_from_what_it_reads_and_for_how_many_rows(rows, options, use):
    assert use_of(rows, **options) == use
    assert isinstance(kernels.default_tuning(use), kernels.Tuning)


def test_an_unknown_use_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'scan'"):
        kernels.default_tuning("scam")


def test_measured_tunings_are_of_the_ways_that_were_tried():
    bench = KernelBench(512, 1, 0.002)
    before = kernels.active_tier()
    try:
        chosen = choosing.measure_tunings(bench, 1, 0.01)
    finally:
        kernels.set_tier(before)
        bench.pool.close()
    assert {use: tuning in choosing.WAYS[use] for use, tuning in chosen.items()} == dict.fromkeys(USES, True)


@pytest.mark.parametrize(
    ("tier", "use", "kept"), [("amx", "matrix", 2), ("avx512", "matrix", 3), ("avx512", "keys8", 3)]
)
def test_ways_that_a_kernel_does_not_tell_apart_are_tried_once(tier, use, kept):
    found = choosing.told_apart(use, tier)
    assert (len(found), found[0]) == (kept, choosing.WAYS[use][0])
    assert set(found) <= set(choosing.WAYS[use])
