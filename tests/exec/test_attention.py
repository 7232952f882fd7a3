"""Attention against a float64 softmax written with loops over rows and heads."""

import pytest
import torch

from herald_exec import attention
from herald_exec.attention import Partial, attend, attend_partial, attend_two_part, length_mask, merge

HEADS, KV_HEADS, DIM = 6, 2, 8


def random_qkv(rows, queries, keys, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, queries, HEADS, DIM, generator=generator)
    k, v = torch.randn(2, rows, KV_HEADS, keys, DIM, generator=generator)
    return q, k, v


def reference(q, k, v, seen):
    """``seen`` is ``[R, Lq, Lk]``; query head h reads KV head h // G."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = q[row, :, head].double() @ k[row, kv].double().T / DIM**0.5
            weights = scores.masked_fill(~seen[row], float("-inf")).softmax(dim=-1).nan_to_num(0)
            out[row, :, head] = weights @ v[row, kv].double()
    return out.float()


@pytest.mark.parametrize("queries", [1, 3, 32])
@pytest.mark.parametrize("keys", [1, 5, 64])
def test_one_range_equals_the_softmax_of_each_head(queries, keys):
    q, k, v = random_qkv(3, queries, keys)
    seen = torch.ones(3, queries, keys, dtype=torch.bool)
    torch.testing.assert_close(attend(q, k, v), reference(q, k, v, seen), rtol=0, atol=1e-5)


def test_ragged_rows_see_only_their_real_keys():
    q, k, v = random_qkv(3, 4, 9)
    lengths = torch.tensor([9, 1, 5])
    expected = reference(q, k, v, length_mask(lengths, 9).expand(3, 4, 9))
    poisoned = k.clone()
    poisoned[1, :, 1:] = 1e4
    torch.testing.assert_close(attend(q, poisoned, v, lengths=lengths), expected, rtol=0, atol=1e-5)


def test_masks_per_query_and_per_row_are_respected():
    q, k, v = random_qkv(2, 4, 7, seed=3)
    seen = torch.rand(2, 4, 7, generator=torch.Generator().manual_seed(4)) < 0.6
    torch.testing.assert_close(attend(q, k, v, mask=seen), reference(q, k, v, seen), rtol=0, atol=1e-5)
    shared = seen[:1].expand(2, 4, 7)
    torch.testing.assert_close(attend(q, k, v, mask=seen[0]), reference(q, k, v, shared), rtol=0, atol=1e-5)


@pytest.mark.parametrize("cut", [0, 1, 8, 15, 16])
def test_parts_merge_to_one_softmax(cut):
    q, k, v = random_qkv(2, 3, 16, seed=cut)
    expected = reference(q, k, v, torch.ones(2, 3, 16, dtype=torch.bool))
    got = merge(
        attend_partial(q, k[:, :, :cut], v[:, :, :cut]),
        attend_partial(q, k[:, :, cut:], v[:, :, cut:]),
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, 4, 16, 17])
def test_keys_scored_in_pieces_equal_one_softmax(monkeypatch, at_once):
    monkeypatch.setattr(attention, "KEYS_AT_ONCE", at_once)
    q, k, v = random_qkv(3, 4, 17, seed=12)
    lengths = torch.tensor([17, 3, 0])
    some = torch.rand(3, 4, 17, generator=torch.Generator().manual_seed(5)) < 0.7
    seen = some & length_mask(lengths, 17)
    part = attend_partial(q, k, v, lengths=lengths, mask=some)
    torch.testing.assert_close(part.output, reference(q, k, v, seen), rtol=0, atol=1e-5)
    scores = torch.einsum("rqhd,rhkd->rqhk", q, k.repeat_interleave(HEADS // KV_HEADS, dim=1)) / DIM**0.5
    weights = scores.exp().masked_fill(~seen[:, :, None], 0)
    torch.testing.assert_close(part.log_sum_exp, weights.sum(-1).log())


def test_scores_of_a_long_context_are_never_held_at_once(monkeypatch):
    held, scores = [], attention._scores

    def counted(*arguments):
        found = scores(*arguments)
        held.append(found.shape[-1])
        return found

    monkeypatch.setattr(attention, "_scores", counted)
    attend_partial(*random_qkv(1, 2, 2 * attention.KEYS_AT_ONCE + 5))
    assert held == [attention.KEYS_AT_ONCE, attention.KEYS_AT_ONCE, 5]


def test_rows_with_an_empty_prefix_attend_to_their_block_alone():
    q, k, v = random_qkv(2, 3, 12, seed=9)
    lengths = torch.tensor([0, 6])
    real = length_mask(lengths, 8).expand(2, 3, 8)
    seen = torch.cat((real, torch.ones(2, 3, 4, dtype=torch.bool)), dim=-1)
    got = attend_two_part(q, (k[:, :, :8], v[:, :, :8]), (k[:, :, 8:], v[:, :, 8:]), prefix_lengths=lengths)
    torch.testing.assert_close(got, reference(q, k, v, seen), rtol=0, atol=1e-5)


def test_a_query_without_any_key_comes_out_as_zero():
    q, k, v = random_qkv(1, 2, 4)
    nothing = torch.zeros(1, 2, 4, dtype=torch.bool)
    assert torch.equal(attend(q, k, v, mask=nothing), torch.zeros_like(q))
    part = attend_partial(q, k, v, mask=nothing)
    assert torch.equal(merge(part, part), torch.zeros_like(q))


def test_large_scores_do_not_overflow_the_merge():
    q, k, v = random_qkv(1, 2, 8, seed=2)
    q = q * 100
    expected = reference(q, k, v, torch.ones(1, 2, 8, dtype=torch.bool))
    parts = [attend_partial(q, k[:, :, i : i + 2], v[:, :, i : i + 2]) for i in range(0, 8, 2)]
    torch.testing.assert_close(merge(*parts), expected, rtol=0, atol=1e-5)


def test_log_sum_exp_is_the_log_of_the_summed_weights():
    q, k, v = random_qkv(2, 3, 5, seed=6)
    scores = torch.einsum("rqhd,rhkd->rqhk", q, k.repeat_interleave(HEADS // KV_HEADS, dim=1)) / DIM**0.5
    part = attend_partial(q, k, v)
    assert isinstance(part, Partial)
    torch.testing.assert_close(part.log_sum_exp, scores.exp().sum(-1).log())


def test_bf16_keeps_its_type_and_stays_near_fp32():
    q, k, v = random_qkv(2, 4, 33, seed=8)
    low = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.float(), attend(q, k, v), rtol=0, atol=0.03)
