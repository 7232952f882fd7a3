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
    even = k / keys.channels(0, 0)
    np.testing.assert_allclose(scales, np.abs(even).max(-1) / 127, rtol=1e-6)
    assert (np.abs(rows * scales[..., None] - even) <= 0.5001 * scales[..., None]).all()


def test_a_channels_factor_is_the_power_of_two_above_its_largest_magnitude():
    pool, k = filled(100, 40)
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 100)
    np.testing.assert_array_equal(keys.channels(0, 0), 2.0 ** (np.floor(np.log2(np.abs(k).max(0))) + 1))


def test_channels_that_stand_out_lose_no_position():
    rng = np.random.default_rng(1)
    k = rng.standard_normal((4000, 2, 128))
    k[:, :, [3, 70]] = k[:, :, [3, 70]] * 20 + 60
    pool = kernels.PagedKV(1, 1, 2, 4000, 128)
    pool.append(0, 0, 0, *(kernels.from_float32(each, "bf16") for each in (k, rng.standard_normal(k.shape))))
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 4000)
    queries = rng.standard_normal((1, 1, 8, 128)).astype(np.float32)
    queries[..., [3, 70]] /= 20
    exact = kernels.select(pool, 0, [0], [4000], queries, [200], options=kernels.SelectOptions(key_only=True))
    found = kernels.select(pool, 0, [0], [4000], queries, [200], keys8=keys)
    assert (found.indices == exact.indices).all()


def test_the_selected_set_is_that_of_exact_keys_but_for_near_ties(tier):
    """Candidates reach far beyond the budget. Only the denominators keep 8-bit scores, some 1e-4 of them."""
    pool, _k = filled()
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 3000)
    queries = np.random.default_rng(3).standard_normal((1, 1, 8, 128)).astype(np.float32)
    options = kernels.SelectOptions(key_only=True, keep_importance=True)
    exact = kernels.select(pool, 0, [0], [3000], queries, [150], options=options)
    all_again = kernels.SelectOptions(rescore_all=True)
    found = kernels.select(pool, 0, [0], [3000], queries, [150], keys8=keys, options=all_again)
    for head in range(2):
        importance, theirs = exact.importance[0, head], exact.indices[0, head]
        differing = np.setxor1d(found.indices[0, head], theirs)
        np.testing.assert_allclose(importance[differing], importance[theirs].min(), rtol=1e-3)
        if not differing.size:
            part = slice(4 * head, 4 * head + 4)
            np.testing.assert_allclose(found.output[:, :, part], exact.output[:, :, part], atol=1e-5)


def test_scoring_only_the_border_again_selects_what_scoring_all_candidates_again_selects(tier):
    """Ranks far above the budget cannot leave it; their weights in the output keep 8-bit scores, off by a hundredth."""
    pool, _k = filled()
    keys = kernels.Int8Keys(pool)
    keys.update(0, 0, 0, 3000)
    queries = np.random.default_rng(3).standard_normal((1, 1, 8, 128)).astype(np.float32)
    border, every = (
        kernels.select(
            pool, 0, [0], [3000], queries, [150], keys8=keys, options=kernels.SelectOptions(rescore_all=whole)
        )
        for whole in (False, True)
    )
    np.testing.assert_array_equal(border.indices, every.indices)
    assert 0 < np.abs(border.output - every.output).max() < 0.02 * np.abs(every.output).max()


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
