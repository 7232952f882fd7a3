"""Samplers: argmax, temperature, top-p, and seeds that belong to a request and not to a batch."""

import numpy as np
import pytest

from herald_pipeline.decoding.sampling import Sampler, hash_uniform
from herald_pipeline.errors import ConfigError


def logits(rows, length, vocab, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, length, vocab)) * 2


def softmax(x):
    weight = np.exp(x - x.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def test_temperature_zero_is_the_argmax_with_its_softmax_probability(array):
    x = logits(2, 3, 11)
    choice = Sampler()(array(x), with_entropy=True)
    p = softmax(x)
    assert np.asarray(choice.token).tolist() == x.argmax(axis=-1).tolist()
    np.testing.assert_allclose(np.asarray(choice.confidence), p.max(axis=-1), rtol=1e-12)
    np.testing.assert_allclose(np.asarray(choice.entropy), -(p * np.log(p)).sum(axis=-1), rtol=1e-9)


def test_entropy_is_finite_where_a_token_is_impossible(array):
    x = array([[[0.0, 0.0, -np.inf]]])
    assert float(Sampler()(x, with_entropy=True).entropy[0, 0]) == pytest.approx(np.log(2))


def test_the_mask_token_is_never_chosen_and_its_probability_lowers_confidence(array):
    x = array([[[1.0, 5.0, 0.0]]])
    choice = Sampler(mask_token_id=1)(x)
    assert int(choice.token[0, 0]) == 0
    assert float(choice.confidence[0, 0]) == pytest.approx(softmax(np.asarray([1.0, 5.0, 0.0]))[0])


def test_a_request_draws_the_same_alone_and_in_a_batch(array):
    x = logits(3, 4, 50)
    sampler = Sampler(temperature=1.0)
    seeds = np.asarray([7, 8, 9])
    place = np.arange(4)[None, :] + 100
    whole = np.asarray(sampler(array(x), seed=array(seeds), position=array(place), step=array([3, 3, 3])).token)
    alone = np.asarray(sampler(array(x[1:2]), seed=array(seeds[1:2]), position=array(place), step=3).token)
    assert (whole[1:2] == alone).all()


def test_both_libraries_draw_the_same():
    torch = pytest.importorskip("torch")
    x = logits(4, 16, 64)
    place = np.arange(16)[None, :]
    sampler = Sampler(temperature=0.8, top_p=0.9)
    ours = sampler(x, seed=np.asarray([1, 2, 3, 2**40]), position=place, step=5).token
    theirs = sampler(
        torch.asarray(x), seed=torch.asarray([1, 2, 3, 2**40]), position=torch.asarray(place), step=5
    ).token
    assert (ours == theirs.numpy()).all()


def test_draws_follow_the_softmax():
    # 20,000 draws from p = (0.5, 0.3, 0.2): three sigma of a share is below 0.011.
    x = np.broadcast_to(np.log([0.5, 0.3, 0.2]), (1, 20_000, 3))
    token = Sampler(temperature=1.0)(x, seed=1, position=np.arange(20_000)[None, :]).token
    shares = np.bincount(token[0], minlength=3) / 20_000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.011)


def test_a_low_temperature_sharpens():
    # At temperature 0.5, p squared and normalised: (0.25, 0.09, 0.04) / 0.38.
    x = np.broadcast_to(np.log([0.5, 0.3, 0.2]), (1, 20_000, 3))
    token = Sampler(temperature=0.5)(x, seed=1, position=np.arange(20_000)[None, :]).token
    shares = np.bincount(token[0], minlength=3) / 20_000
    np.testing.assert_allclose(shares, np.asarray([0.25, 0.09, 0.04]) / 0.38, atol=0.011)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    # 0.5 + 0.3 reaches 0.75; the third token is never drawn, the first two in proportion 5 : 3.
    x = np.broadcast_to(np.log([0.2, 0.5, 0.3]), (1, 20_000, 3))
    token = Sampler(temperature=1.0, top_p=0.75)(x, seed=1, position=np.arange(20_000)[None, :]).token
    shares = np.bincount(token[0], minlength=3) / 20_000
    assert shares[0] == 0
    np.testing.assert_allclose(shares[1:], [0.625, 0.375], atol=0.011)


def test_a_tiny_top_p_is_the_argmax():
    x = logits(1, 40, 9)
    token = Sampler(temperature=3.0, top_p=1e-9)(x, seed=4, position=np.arange(40)[None, :]).token
    assert (token == x.argmax(axis=-1)).all()


def test_confidence_is_the_plain_softmax_whatever_the_temperature():
    x = logits(1, 8, 5)
    choice = Sampler(temperature=2.0, top_p=0.5)(x, seed=3, position=np.arange(8)[None, :])
    expected = np.take_along_axis(softmax(x), choice.token[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(choice.confidence, expected, rtol=1e-12)


def test_hashed_numbers_are_uniform_and_uncorrelated():
    draws = hash_uniform(np.arange(100_000), 5)
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    # 99 degrees of freedom: chi-squared above 160 has probability 1e-4.
    assert ((counts - 1000) ** 2 / 1000).sum() < 160
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.015
    assert (draws >= 0).all()
    assert (draws < 1).all()


def test_every_part_of_the_key_changes_the_draw():
    base = hash_uniform(np.arange(64), 1, 2)
    for other in (hash_uniform(np.arange(64) + 64, 1, 2), hash_uniform(np.arange(64), 2, 2)):
        assert (base != other).mean() > 0.99
    assert (base != hash_uniform(np.arange(64), 1 + 2**32, 2)).mean() > 0.99


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be >= 0"),
        ({"temperature": float("nan")}, "temperature must be finite"),
        ({"top_p": 0}, "top_p must be > 0"),
        ({"top_p": 1.1}, "top_p must be <= 1"),
    ],
)
def test_settings_out_of_range_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        Sampler(**params)
