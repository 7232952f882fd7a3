"""InfiniGen's proxy: an orthogonal basis per KV head whose first columns carry the scores, and what they pick."""

import numpy as np
import pytest
import torch

from herald_exec.models import tiny
from herald_exec.models.forward import prefill
from herald_exec.pools import KV
from herald_exec.prefill import importance, top_positions
from herald_exec.proxies import PartialKeys, proxy_importance, skew
from herald_exec.reference import open_reference, read_shipped_material
from herald_exec.reference.tasks import draw_samples


def test_all_columns_leave_every_score_as_it_is():
    torch.manual_seed(0)
    basis = skew(torch.randn(40, 4, 16), 2, 1.0)
    assert basis.shape == (2, 16, 16)
    q, k = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    torch.testing.assert_close((q @ basis) @ (k @ basis).mT, q @ k.mT, atol=1e-4, rtol=1e-4)


def test_kept_columns_are_those_with_the_largest_query_weight():
    """Of right singular vectors, by numpy: the third of them with most absolute weight."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((50, 4, 6)) * np.array([9, 1, 4, 0.1, 0.2, 0.3])
    found = skew(torch.tensor(queries, dtype=torch.float32), 2, 1 / 3)
    for head in range(2):
        joined = queries[:, 2 * head : 2 * head + 2].reshape(100, 6)
        basis = np.linalg.svd(joined)[2].T
        kept = np.argsort(-np.abs(joined @ basis).sum(0))[:2]
        np.testing.assert_allclose(np.abs(found[head].numpy()), np.abs(basis[:, kept]), atol=1e-4)


def test_a_prompt_shorter_than_the_head_dimension_has_a_basis_too():
    for tokens in (0, 1, 3):
        columns = skew(torch.randn(tokens, 4, 16), 2, 0.2)
        torch.testing.assert_close(columns.mT @ columns, torch.eye(3).expand(2, 3, 3), atol=1e-5, rtol=0)


def test_no_query_outvotes_the_others_by_its_range():
    """Three queries look at position 0 by a little; one with scores a hundred times larger prefers position 1."""
    keys = torch.eye(4)[None, None, :3, :]
    columns = torch.eye(4)[None, None]
    queries = torch.tensor([[6.0, 0, 0, 0]] * 3 + [[0, 600.0, 0, 0]])[None, :, None]
    weights = proxy_importance(queries, keys, columns)[0, 0]
    assert weights.sum().item() == pytest.approx(4.0)
    assert weights.argmax() == 0


@pytest.mark.parametrize(("task", "share"), [("kv", 0.3), ("multi", 0.3)])
def test_on_the_shipped_model_a_fifth_of_the_columns_finds_what_attention_selects(task, share):
    """Its own queries and partial keys, 5% of a prompt; by chance 5% would be found."""
    model = open_reference().load("cpu", torch.float32)
    (sample,) = draw_samples(read_shipped_material(), task, 1024, 1, first_seed=10_000)
    seen = []
    masks = torch.full((32,), model.shape.mask_token_id)
    prefill(model, torch.cat([torch.tensor(sample.prompt), masks]), lambda layer, q, k, v: seen.append((q[0], k[0])))
    found, keys = [], PartialKeys(model, 0.2, 1, 1024)
    for layer, (q, k) in enumerate(seen):
        k = k if k.shape[0] == model.shape.num_kv_heads else k.transpose(0, 1)
        keys.begin(layer, 0, q[:1024])
        keys.write(layer, 0, 0, k[:, :1024])
        picked = keys.pick(layer, 0, q[1024:], 1024, 51)
        past, own = KV(k[None, :, :1024], k[None, :, :1024]), KV(k[None, :, 1024:], k[None, :, 1024:])
        exact = top_positions(importance(q[None, 1024:], past, own), 51)[0]
        found += [len(set(a.tolist()) & set(b.tolist())) / 51 for a, b in zip(picked, exact, strict=True)]
    assert np.mean(found) > share


def test_a_columns_positions_lie_together():
    """What the device's kernel reads in whole words, whichever way the keys were written."""
    keys = PartialKeys(tiny(), 0.3, 2, 64)
    keys.draw(0, 1, 40)
    drawn = keys.keys(0)
    assert drawn.mT.is_contiguous()
    assert drawn[1, :, :40].std() > 0.5
    assert not drawn[0].any()
    assert not drawn[1, :, 40:].any()
