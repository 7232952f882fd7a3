"""ShadowKV: factors against numpy's SVD, the choice against the rule in float64, tokens against dense."""

import random
import time

import numpy as np
import pytest
import torch

from herald_exec import Options, decode
from herald_exec import execution as execution_module
from herald_exec.models import forward, tiny
from herald_exec.models.layers import rotary_table, rotate
from herald_exec.policy import PlannedPolicy
from herald_exec.pools import Pools
from herald_exec.shadow import Shadow, basis_of, choose, chunk_means, chunk_scores, outliers_of
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import RunError
from herald_pipeline.methods.shadowkv import CHUNK
from herald_pipeline.pools import RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.steps import ListedSteps

KV_HEADS, DIM = 2, 16


def policy(rows=((1, 3, 8), (2, 5, 1), (8,))):
    return PlannedPolicy(ListedSteps(rows, 8), Sampler(mask_token_id=1), order="scripted")


def random_keys(count, seed=0, heads=KV_HEADS):
    return torch.randn(heads, count, DIM, generator=torch.Generator().manual_seed(seed))


def shadow_of(model, tokens=256, selected=64, rank=None):
    settings = Settings(block_length=8, queries=8, kv_dtype="fp32", dram_kv_dtype="fp32")
    return Shadow(model, settings, 2, RequestSize(tokens, selected, 8), rank)


def at(*positions):
    """The same positions for every KV head."""
    return torch.tensor(positions).expand(KV_HEADS, -1)


# Factors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 5, 12, 32])
def test_low_rank_keys_are_the_best_of_their_rank(rank):
    """Truncated SVD, Eckart and Young: numpy's reconstruction from the leading singular triples."""
    keys = torch.randn(90, 32, generator=torch.Generator().manual_seed(3))
    basis = basis_of(keys, rank).numpy()
    u, s, vh = np.linalg.svd(keys.numpy().astype(np.float64), full_matrices=False)
    expected = (u[:, :rank] * s[:rank]) @ vh[:rank]
    np.testing.assert_allclose(keys.numpy() @ basis @ basis.T, expected, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 8, 20])
def test_a_prompt_shorter_than_the_keys_are_wide_still_gives_a_full_basis(count):
    """So that at full rank the keys of later blocks come back too."""
    basis = basis_of(torch.randn(count, 32, generator=torch.Generator().manual_seed(count)), 32)
    torch.testing.assert_close(basis @ basis.T, torch.eye(32, dtype=torch.float64))


def rebuilt_by_numpy(model, keys, rank):
    """Turn back, join heads, truncate, turn again: all in float64 but for the angles."""
    count = keys.shape[1]
    angles = rotary_table(torch.arange(count), DIM, model.shape.rope_theta)
    cos, sin = (part.double()[None].numpy() for part in angles)
    k = keys.double().numpy()
    low, high = k[..., : DIM // 2], k[..., DIM // 2 :]
    plain = np.concatenate([low * cos + high * sin, high * cos - low * sin], -1)
    joined = plain.transpose(1, 0, 2).reshape(count, -1)
    u, s, vh = np.linalg.svd(joined, full_matrices=False)
    best = ((u[:, :rank] * s[:rank]) @ vh[:rank]).reshape(count, KV_HEADS, DIM).transpose(1, 0, 2)
    low, high = best[..., : DIM // 2], best[..., DIM // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("rank", [4, 20, 32])
def test_rebuilt_keys_are_numpys_low_rank_keys_turned_to_their_positions(model, rank):
    keys, shadow = random_keys(120), shadow_of(model, rank=rank)
    shadow.factor(1, 0, keys, outliers=0)
    positions = torch.tensor([[0, 3, 40, 77], [1, 2, 50, 87]])
    expected = rebuilt_by_numpy(model, keys, rank)
    found = shadow.keys_at(1, 0, positions, 120).numpy()
    for head in range(KV_HEADS):
        np.testing.assert_allclose(found[head], expected[head][positions[head]], atol=2e-5)


def test_keys_of_the_newest_chunks_and_of_outliers_come_back_whole(model):
    """At rank 2 all others do not."""
    keys, shadow = random_keys(120), shadow_of(model, selected=128, rank=2)
    shadow.factor(0, 1, keys, outliers=3)
    found = shadow.keys_at(0, 1, at(*range(120)), 120)
    whole = (found == keys).all(-1)
    outliers = outliers_of(keys, chunk_means(keys), 3)
    for head in range(KV_HEADS):
        expected = {p for chunk in outliers[head].tolist() for p in range(8 * chunk, 8 * chunk + 8)} | set(
            range(88, 120)
        )
        assert set(whole[head].nonzero().flatten().tolist()) == expected


def test_a_folded_block_is_projected_on_the_prompts_basis_and_joins_the_landmarks(model):
    """Blocks of 12 do not fill whole chunks: landmarks appear when one is full."""
    keys, shadow = random_keys(100), shadow_of(model)
    shadow.factor(2, 0, keys[:, :64], outliers=0)
    for start in (64, 76, 88):
        shadow.fold(2, 0, start, keys[:, start : start + 12])
    torch.testing.assert_close(shadow._landmarks[2, 0, :, :12], chunk_means(keys))
    torch.testing.assert_close(shadow.keys_at(2, 0, at(*range(100)), 100), keys, atol=2e-5, rtol=1e-5)


def test_landmarks_are_means_of_keys_after_rope():
    keys = random_keys(27)
    expected = keys[:, :24].double().numpy().reshape(KV_HEADS, 3, 8, DIM).mean(2)
    np.testing.assert_allclose(chunk_means(keys).numpy(), expected, atol=1e-6)


def test_outliers_are_the_chunks_with_a_key_least_like_the_landmark():
    keys = torch.ones(1, 80, DIM) + 0.01 * random_keys(80, heads=1)
    keys[0, 43] *= -1  # chunk 5
    keys[0, 71, : DIM // 2] = 0  # chunk 8
    assert outliers_of(keys, chunk_means(keys), 2).tolist() == [[5, 8]]


# Choice ----------------------------------------------------------------------------------------------------------


def scores_by_numpy(queries, landmarks, excluded):
    q, marks = queries.double().numpy(), landmarks.double().numpy()
    out = np.zeros(marks.shape[:2])
    group = q.shape[1] // marks.shape[0]
    for head in range(marks.shape[0]):
        free = [c for c in range(marks.shape[1]) if not excluded[head, c]]
        for member in range(group if free else 0):
            logits = q[:, head * group + member] @ marks[head, free].T / np.sqrt(q.shape[2])
            weights = np.exp(logits - logits.max(1, keepdims=True))
            summed = (weights / weights.sum(1, keepdims=True)).sum(0)
            out[head, free] = np.maximum(out[head, free], summed)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_the_largest_of_the_group_of_softmax_sums(seed):
    generator = torch.Generator().manual_seed(seed)
    queries = 3 * torch.randn(8, 4, DIM, generator=generator)
    landmarks, excluded = random_keys(13, seed), torch.rand(KV_HEADS, 13, generator=generator) < 0.3
    found = chunk_scores(queries, landmarks, excluded)
    np.testing.assert_allclose(found.numpy(), scores_by_numpy(queries, landmarks, excluded), atol=1e-5)


def test_landmarks_that_are_all_excluded_score_nothing():
    assert chunk_scores(torch.ones(2, 4, DIM), random_keys(3), torch.ones(KV_HEADS, 3, dtype=torch.bool)).sum() == 0


def chosen_by_rule(scores, outliers, prefix, count):
    chunks = len(scores)
    newest = [c for c in range(chunks - 1, -1, -1) if c >= chunks - 4]
    rest = [c for c in range(chunks) if c not in newest]
    order = newest + [c for c in rest if outliers[c]]
    order += sorted((c for c in rest if not outliers[c]), key=lambda c: (-scores[c], c))
    positions = [*range(8 * chunks, prefix), *(8 * c + i for c in order for i in range(8))]
    return sorted(positions[:count])


@pytest.mark.parametrize("prefix", [0, 5, 24, 83, 160])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.37, 1.0])
def test_choice_is_newest_then_outliers_then_best_and_the_last_chunk_is_cut(prefix, share):
    generator = torch.Generator().manual_seed(prefix)
    chunks, count = prefix // CHUNK, int(share * prefix)
    scores = torch.rand(KV_HEADS, chunks, generator=generator)
    outliers = torch.rand(KV_HEADS, chunks, generator=generator) < 0.15
    found = choose(scores, outliers, prefix, count)
    assert found.tolist() == [
        chosen_by_rule(scores[h].tolist(), outliers[h].tolist(), prefix, count) for h in range(KV_HEADS)
    ]


def test_of_equal_scores_the_lower_chunk_is_taken():
    found = choose(torch.ones(1, 10), torch.zeros(1, 10, dtype=torch.bool), 80, 48)
    assert found[0].tolist() == [*range(16), *range(48, 80)]


def test_a_block_picks_by_its_own_queries_landmarks_and_outliers(model):
    """The store's choice against the same rule on plain keys, in float64."""
    keys, shadow = random_keys(160), shadow_of(model, selected=128)
    shadow.factor(0, 0, keys, outliers=2)
    queries = 2 * torch.randn(8, 4, DIM, generator=torch.Generator().manual_seed(9))
    means = chunk_means(keys)
    marked = torch.zeros(KV_HEADS, 20, dtype=torch.bool).scatter_(1, outliers_of(keys, means, 2), True)
    newest = torch.arange(20) >= 16
    scores = scores_by_numpy(queries, means, marked | newest)
    expected = [chosen_by_rule(scores[h].tolist(), marked[h].tolist(), 160, 70) for h in range(KV_HEADS)]
    assert shadow.pick(0, 0, queries, 160, 70).tolist() == expected


# Values ----------------------------------------------------------------------------------------------------------


def test_values_are_staged_in_the_order_of_their_positions(model):
    shadow, values = shadow_of(model), random_keys(50)
    shadow.store_values(0, 1, 0, values)
    shadow.stage_values(0, 1, torch.tensor([[1, 7], [0, 49]]))
    expected = torch.stack([values[0, [1, 7]], values[1, [0, 49]]])
    assert torch.equal(shadow.staged(1, 2), expected)


def test_a_gap_between_values_and_a_read_behind_them_are_errors(model):
    shadow = shadow_of(model)
    shadow.store_values(0, 0, 0, random_keys(16))
    with pytest.raises(RunError, match="16 values are stored, the next write begins at 24"):
        shadow.store_values(0, 0, 24, random_keys(8))
    with pytest.raises(RunError, match="position 16 is read, 16 are stored"):
        shadow.stage_values(0, 0, at(16))


# Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [4, 8, 12])
def test_at_full_budget_and_full_rank_its_tokens_are_denses(kit, block):
    """Blocks that fill no chunk, exactly one, and one and a half."""
    model = tiny(block_length=block, eos_token_ids=())
    requests, plan = kit.prompts([90, 21, 64], 3 * block), ListedSteps(((1, 3, 4), (2, 4, 1), (3,)), block)
    steps = PlannedPolicy(plan, Sampler(mask_token_id=1), order="scripted")
    answers = [
        decode(
            kit.describe(name, model.shape, budget=1.0), model, requests, policy=steps, options=Options(3, check=True)
        ).answers
        for name in ("shadowkv", "dense")
    ]
    assert answers[0] == answers[1]


def test_with_outliers_in_the_budget_its_tokens_are_the_slow_decoders(kit, model):
    """k of 100 and more: two outlier chunks and more, a third of the chunks left out."""
    pipeline, request = kit.describe("shadowkv", model.shape, budget=0.5), kit.prompts([205], 40)[0]
    steps = policy(((1, 3, 8, 2, 4),))
    run = decode(pipeline, model, [request], policy=steps, options=Options(check=True))
    oracle = kit.Oracle(model, pipeline.settings, steps.plan.steps, model.shape.eos_token_ids)
    assert run.answers[0] == oracle.decode(request, "shadowkv")


@pytest.fixture
def last_shadow(monkeypatch):
    """The pools of a run that ended, before they were freed: values and keys of slot 0."""
    held = {}

    class Seen(Pools):
        def close(self):
            if self.shadow is not None and "values" not in held:
                layers = range(len(self.shadow._lengths))
                held["values"] = torch.stack([self.shadow.values(layer, 0).clone() for layer in layers])
                count = held["values"].shape[2]
                everything = at(*range(count))
                held["keys"] = torch.stack([self.shadow.keys_at(layer, 0, everything, count) for layer in layers])
            super().close()
            held["left"] = self.num_bytes

    monkeypatch.setattr(execution_module, "Pools", Seen)
    return held


def test_every_completed_token_reaches_the_shadow_and_the_host_as_a_prefill_would_compute_it(kit, model, last_shadow):
    request = kit.prompts([43], 21)[0]
    run = decode(kit.describe("shadowkv", model.shape, budget=1.0), model, [request], policy=policy())
    text = torch.tensor([*request.prompt, *run.answers[0]])
    assert last_shadow["values"].shape[2] == len(text) == 64
    straight = forward(model, text[None])
    for layer in range(model.shape.num_layers):
        torch.testing.assert_close(last_shadow["values"][layer], straight.values[layer][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last_shadow["keys"][layer], straight.keys[layer][0], atol=2e-5, rtol=1e-5)
    assert last_shadow["left"] == 0


def test_its_memory_is_what_the_description_declares(kit, model, monkeypatch):
    seen = {}

    class Seen(Pools):
        def close(self):
            seen.setdefault("shadow", self.shadow and self.shadow.num_bytes)
            super().close()

    monkeypatch.setattr(execution_module, "Pools", Seen)
    pipeline = kit.describe("shadowkv", model.shape, budget=1.0)
    decode(pipeline, model, kit.prompts([120], 16), policy=policy())
    size = RequestSize(136, 128, 8)
    declared = sum(pipeline.pool(name).bytes_per_request(size) for name in ("shadow", "values"))
    staged = pipeline.pool("staged_values").bytes_per_request(size)
    places = model.shape.num_layers * KV_HEADS * (136 // 8) * 4
    assert seen["shadow"] == declared + staged + places


def test_at_a_low_rank_the_answer_is_of_keys_rebuilt_at_that_rank(kit, model, monkeypatch):
    """A double of the store at rank 4 changes what is decoded: the rebuilt keys are those that are attended to."""
    requests = kit.prompts([200], 24)
    pipeline = kit.describe("shadowkv", model.shape, budget=0.5)
    full = decode(pipeline, model, requests, policy=policy()).answers
    monkeypatch.setattr(execution_module, "Shadow", lambda *arguments: Shadow(*arguments, rank=4))
    low = decode(pipeline, model, requests, policy=policy()).answers
    assert full != low


def test_delays_before_any_stage_change_no_token(kit, model):
    """One place between gather and upload, values and keys written beside each other: order is by edges alone."""
    requests, pipeline = kit.prompts([90, 33, 50], [16, 24, 9]), kit.describe("shadowkv", model.shape, budget=0.4)
    expected = decode(pipeline, model, requests, policy=policy(), options=Options(batch=2)).answers
    for seed in range(6):
        draw = random.Random(seed)
        options = Options(
            batch=2, check=True, before_stage=lambda _, draw=draw: time.sleep(draw.choice((0, 0, 1e-4, 1e-3)))
        )
        assert decode(pipeline, model, requests, policy=policy(), options=options).answers == expected, seed


def test_rotation_back_and_forth_is_exact_but_for_rounding(model):
    keys = random_keys(40)
    rotary = model.rotary(torch.arange(40))
    turned = rotate(shadow_of(model)._plain(keys, 0).view(40, KV_HEADS, DIM), rotary).transpose(0, 1)
    torch.testing.assert_close(turned, keys, atol=1e-6, rtol=1e-6)
