"""Results' memory: used again when nobody holds it, never before."""

import gc

import numpy as np

from herald_exec import kernels
from herald_exec.kernels import results

SHAPE = (results.LEAST_BYTES // 4,)


def test_memory_is_used_again_once_its_array_is_gone():
    first = results.empty(SHAPE, np.float32)
    address = first.ctypes.data
    del first
    gc.collect()
    assert results.empty(SHAPE, np.int32).ctypes.data == address


def test_memory_that_any_view_holds_is_left_alone():
    first = results.empty(SHAPE, np.float32)
    first[:] = 7
    view = first.reshape(2, -1)[1, 3:]
    del first
    others = [results.empty(SHAPE, np.float32) for _ in range(results.MOST_KEPT + 2)]
    for each in others:
        each[:] = 0
    assert (view == 7).all()
    assert len({each.ctypes.data for each in others}) == len(others)


def test_kept_memory_is_bounded():
    held = [results.empty((results.LEAST_BYTES + 64 * i,), np.uint8) for i in range(3 * results.MOST_KEPT)]
    assert len(results._kept) <= results.MOST_KEPT
    del held
    for factor in (4, 16, 64):  # of shapes that no kept memory fits: the free ones make room
        results.empty((factor * results.LEAST_BYTES,), np.uint8)
    assert any(memory.nbytes == 64 * results.LEAST_BYTES for memory in results._kept)


def test_a_selection_that_is_held_keeps_its_numbers_while_others_are_made():
    pool = kernels.PagedKV(1, 2, 2, 512, 64)
    pool.fill_normal(1)
    queries = np.random.default_rng(0).standard_normal((2, 32, 8, 64)).astype(np.float32)
    kept = kernels.select(pool, 0, [0, 1], [512, 300], queries, [64, 64])
    before = kept.output.copy(), kept.indices.copy()
    for _ in range(3):
        kernels.select(pool, 0, [1, 0], [300, 512], -queries, [64, 64])
    np.testing.assert_array_equal(kept.output, before[0])
    np.testing.assert_array_equal(kept.indices, before[1])
