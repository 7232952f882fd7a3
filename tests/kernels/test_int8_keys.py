"""8-bit keys: what is stored, what stays exact, what is refused."""

import numpy as np
import pytest

from herald_exec import kernels
from herald_pipeline.errors import CapacityError, ConfigError, RunError


def filled(tokens=3000, head_dim=128, seed=0):
    rng = np.random.default_rng(seed)
    pool = kernels.PagedKV(1, 1, 2, tokens, head_dim)
    k, v = (kernels.from_float32(rng.standard_normal((tokens, 2, head_dim)), "bf16") for _ in range(2))
    pool.append(0, 0, 0, k, v)
    return pool, kernels.to_float32(k, "bf16")


def test_a_row_is_kept_to_half_a_step_of_its_own_scale():
    pool, k = filled(100, 40)
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 100)
    rows, scales = keys.read(0, 0, 0, 100)
    np.testing.assert_allclose(scales, np.abs(k).max(-1) / 127, rtol=1e-6)
    assert (np.abs(rows * scales[..., None] - k) <= 0.5001 * scales[..., None]).all()


def test_the_selected_set_is_that_of_exact_keys(tier):
    """Random keys: candidates reach far beyond the budget, so no position is lost."""
    pool, _k = filled()
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 3000)
    queries = np.random.default_rng(3).standard_normal((1, 1, 8, 128)).astype(np.float32)
    exact = kernels.select(pool, 0, [0], [3000], queries, [150], options=kernels.SelectOptions(key_only=True))
    found = kernels.select(pool, 0, [0], [3000], queries, [150], keys8=keys)
    same = [len(np.intersect1d(found.indices[0, head], exact.indices[0, head])) for head in range(2)]
    assert min(same) >= 149
    np.testing.assert_allclose(found.output, exact.output, atol=2e-2 * np.abs(exact.output).max())


def test_an_update_of_a_part_leaves_the_rest():
    pool, _k = filled(200, 64)
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 60, 70)
    rows, scales = keys.read(0, 0, 0, 200)
    assert not rows[:60].any()
    assert not rows[70:].any()
    assert (scales[60:70] > 0).all()


def test_keys_of_another_pool_are_refused():
    pool, _k = filled(100, 64)
    other, _k = filled(100, 64)
    queries = np.ones((1, 1, 4, 64), np.float32)
    with pytest.raises(ConfigError, match=r"pass Int8Keys\(store\)"):
        kernels.select(pool, 0, [0], [100], queries, [5], keys8=kernels.Int8Keys(other))


def test_smoothing_is_refused_with_8_bit_keys():
    pool, _k = filled(100, 64)
    queries = np.ones((1, 1, 4, 64), np.float32)
    with pytest.raises(ConfigError, match="drop smoothing"):
        kernels.select(
            pool,
            0,
            [0],
            [100],
            queries,
            [5],
            keys8=kernels.Int8Keys(pool),
            options=kernels.SelectOptions(smoothing=3),
        )


def test_positions_that_the_pool_lacks_are_refused_and_a_closed_copy_says_so():
    pool, _k = filled(64, 64)
    keys = kernels.Int8Keys(pool)
    with pytest.raises(CapacityError, match="do not fit"):
        keys.update(0, 0, 0, 65)
    keys.close()
    keys.close()
    with pytest.raises(RunError, match="closed"):
        keys.update(0, 0, 0, 1)
