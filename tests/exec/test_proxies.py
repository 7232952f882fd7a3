"""InfiniGen's skew: an orthogonal basis per KV head whose first columns carry the scores."""

import torch

from herald_exec.proxies import skew


def test_all_columns_leave_every_score_as_it_is(model):
    torch.manual_seed(0)
    columns = skew(model, 1.0)
    assert len(columns) == model.shape.num_layers
    for basis in columns:
        assert basis.shape == (2, 16, 16)
        q, k = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
        torch.testing.assert_close((q @ basis) @ (k @ basis).mT, q @ k.mT, atol=1e-4, rtol=1e-4)


def test_kept_columns_are_those_with_the_largest_query_weight(model):
    """A fifth of the columns holds more of the queries' weight than a fifth."""
    whole, kept = skew(model, 1.0), skew(model, 0.2)
    for all_columns, few in zip(whole, kept, strict=True):
        assert few.shape[-1] == 3
        torch.testing.assert_close(all_columns[..., :3].abs(), few.abs(), atol=1e-4, rtol=1e-4)


def test_a_model_has_one_basis(model):
    for one, other in zip(skew(model, 0.2), skew(model, 0.2), strict=True):
        assert torch.equal(one, other)
