"""Memory of a closed pool, left to the next one."""

import numpy as np
import pytest

from herald_exec.kernels import PagedKV, kept


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(kept, "LEAST_BYTES", 1 << 20)


def pool(tokens: int = 2048, dtype: str = "bf16") -> PagedKV:
    """About two megabytes at 2,048 tokens."""
    return PagedKV(1, 2, 1, tokens, 128, dtype)


def test_a_pool_begins_with_the_memory_and_the_normals_that_an_earlier_one_left():
    with kept.keep_memory():
        with pool() as first:
            first.fill_normal(seed=1)
            address, before = first.address, first.pages.copy()
        with pool() as second:
            second.fill_normal(seed=2)
            assert second.address == address
            np.testing.assert_array_equal(second.pages, before)


def test_what_an_earlier_and_smaller_pool_did_not_fill_is_filled():
    with kept.keep_memory():
        with pool(4096):
            pass
        with pool(2048) as small_pool:
            small_pool.fill_normal(seed=1)
        with pool(4096) as large_pool:
            large_pool.fill_normal(seed=1)
            assert np.count_nonzero(large_pool.pages) > 0.99 * large_pool.pages.size


def test_another_format_is_filled_anew():
    with kept.keep_memory():
        with pool() as first:
            first.fill_normal(seed=1)
        with pool(1024, "fp32") as second:
            second.fill_normal(seed=1)
            assert float(second.pages.std()) == pytest.approx(1.0, abs=0.02)


def test_a_larger_pool_gets_memory_of_its_own_size():
    with kept.keep_memory():
        with pool(2048):
            pass
        with pool(8192) as larger:
            larger.fill_normal(seed=1)
            assert np.count_nonzero(larger.pages) > 0.99 * larger.pages.size


def test_nothing_is_kept_outside_and_all_is_freed_at_the_end(monkeypatch):
    freed, unmap = [], kept._core.unmap_memory

    class Core:
        map_memory = staticmethod(kept._core.map_memory)

        @staticmethod
        def unmap_memory(address, size):
            freed.append(address)
            unmap(address, size)

    monkeypatch.setattr(kept, "_core", Core)
    with pool() as plain:
        address = plain.address
    assert freed == [address]
    with kept.keep_memory():
        with pool() as first:
            inside = first.address
        assert freed == [address]
    assert freed == [address, inside]
