"""The decoding loop: caches against each other, batches against single rows, and what --check catches."""

from dataclasses import replace

import pytest
import torch

from herald_exec.bidirectional import Loop, decode, make_batch
from herald_exec.bidirectional.kv import VersionedKV
from herald_exec.models import random_model, tiny
from herald_exec.models.base import BlockModel
from herald_pipeline.decoding import caches
from herald_pipeline.decoding.policy import combination_problem, make_policy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError, RunError

RESPONSE = 20
SCHEDULERS = {
    "fixed": {"block": 8},
    "adablock": {"block": 8},
    "dsb-const": {"s_init": 8},
    "dsb-greedy": {"s_init": 8},
}
ALL = [
    (scheduler, cache)
    for scheduler in SCHEDULERS
    for cache in caches.names()
    if not cache.endswith(("dream", "released"))  # other parameters of caches that are here
    if combination_problem("random", scheduler, cache, bidirectional=True) is None
]


def policy_of(scheduler="dsb-greedy", cache="none", *, decoder="confidence", **cache_params):
    if cache == "dkv-greedy":
        decoder = "random"
    return make_policy(
        decoder,
        scheduler,
        cache,
        steps=4,
        decoder_params={"threshold": 0.5} if decoder == "confidence" else {},
        scheduler_params=SCHEDULERS[scheduler],
        cache_params=cache_params,
    )


def run(model, prompts, policy, **options):
    return decode(model, make_batch(model.shape, prompts, RESPONSE), policy, check=True, **options)


def commits_by_row(decoded, row):
    return [commits[row] for commits in decoded.commits if commits[row]]


@pytest.mark.parametrize(("scheduler", "cache"), ALL)
def test_every_combination_fills_every_response_and_passes_its_checks(model, prompts, scheduler, cache):
    decoded = run(model, prompts, policy_of(scheduler, cache))
    for row, prompt in enumerate(prompts):
        assert decoded.tokens[row, : len(prompt)].tolist() == prompt
        response = decoded.response(row, trim=False)
        assert len(response) == RESPONSE
        # MASK is never chosen, so what is left of it would be an open position.
        assert model.shape.mask_token_id not in response
        committed = [position for commits in commits_by_row(decoded, row) for position in commits]
        assert sorted(committed) == list(range(len(prompt), len(prompt) + RESPONSE))


def test_confidences_lie_on_both_sides_of_the_threshold(model, prompts):
    # Otherwise the tests of this file would see one commit a round, or all at once.
    commits = run(model, prompts, policy_of()).statistics()["commits_per_round"]
    assert any(1 < number < 8 for row in commits for number in row)
    assert any(number == 1 for row in commits for number in row)


@pytest.mark.parametrize(("scheduler", "cache"), [pair for pair in ALL if pair[0] != "dsb-const"])
def test_a_batch_of_ragged_rows_equals_its_rows_alone(model, prompts, scheduler, cache):
    together = run(model, prompts, policy_of(scheduler, cache))
    for row, prompt in enumerate(prompts):
        alone = run(model, [prompt], policy_of(scheduler, cache))
        assert alone.response(0, trim=False) == together.response(row, trim=False)
        assert commits_by_row(alone, 0) == commits_by_row(together, row)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_dsb_window_over_everything_equals_no_cache_exactly(model, prompts, scheduler):
    wide = policy_of(scheduler, "dsb", prefix_window=10**6, suffix_window=10**6)
    cached, plain = (run(model, prompts, policy) for policy in (wide, policy_of(scheduler)))
    assert cached.commits == plain.commits
    assert (cached.tokens == plain.tokens).all()
    assert cached.statistics()["reused_positions"] == 0


def test_a_refresh_every_token_equals_no_cache_exactly(model, prompts):
    # One commit a round and a refresh after each commit: every round is a full forward.
    always = policy_of("dsb-const", "dsb", decoder="top1", refresh_every=1, refresh_commits_count=True)
    plain = policy_of("dsb-const", decoder="top1")
    assert run(model, prompts, always).commits == run(model, prompts, plain).commits


def test_caches_that_reuse_do_change_logits(model, prompts):
    # The approximation is real: without this, the equalities above would say nothing.
    plain = run(model, prompts, policy_of("fixed"))
    dual = run(model, prompts, policy_of("fixed", "dual"))
    assert dual.statistics()["reused_positions"] > 0
    assert not (dual.tokens == plain.tokens).all()


@pytest.mark.parametrize("cache", ["dual", "dsb", "prefix", "dkv"])
def test_a_window_position_carries_this_round_and_a_reused_one_an_older(llada, prompts, cache):
    loop = Loop(llada, make_batch(llada.shape, prompts, RESPONSE), policy_of("dsb-const", cache), check=True)
    with torch.no_grad():
        for done in loop.rounds():
            version = loop.kv.version
            assert (version[:, done.plan.forwarded] == done.number).all()
            assert (version[:, done.plan.reused] < done.number).all()


def test_check_reports_an_entry_that_was_not_written(llada, prompts, monkeypatch):
    write = VersionedKV.write

    def forgetful(self, layer, rows, positions, k, v, round_number):
        # Layer 1 forgets the last position of each round.
        kept = slice(None, -1) if layer == 1 else slice(None)
        write(self, layer, rows[kept], positions[kept], k[kept], v[kept], round_number)

    monkeypatch.setattr(VersionedKV, "write", forgetful)
    with pytest.raises(RunError, match=r"must be computed in this round: layer 1, row 2, position 31 carries round -1"):
        run(llada, prompts, policy_of())


def test_check_reports_a_reused_entry_older_than_the_last_refresh(llada, prompts):
    loop = Loop(llada, make_batch(llada.shape, prompts, RESPONSE), policy_of("fixed", "dual"), check=True)
    with torch.no_grad():
        loop.step()
        loop.kv.refreshed += 5
        with pytest.raises(RunError, match=r"(?s)no reused position may be older.*last refresh: round 5"):
            loop.step()


def test_a_literal_mask_token_in_a_prompt_stays_what_it_is(model):
    mask = model.shape.mask_token_id
    decoded = run(model, [[1, mask, 3]], policy_of())
    assert decoded.tokens[0, :3].tolist() == [1, mask, 3]
    assert mask not in decoded.response(0, trim=False)


def test_sampling_is_the_requests_own(llada, prompts):
    sampler = Sampler(temperature=1.0, top_p=0.9, mask_token_id=llada.shape.mask_token_id)

    def sampled(which, seeds):
        batch = make_batch(llada.shape, [prompts[i] for i in which], RESPONSE, seeds=seeds)
        decoded = decode(llada, batch, policy_of(), sampler)
        return [decoded.response(row, trim=False) for row in range(len(which))]

    together = sampled([0, 1, 2], [5, 6, 7])
    assert sampled([1], [6]) == together[1:2]
    assert sampled([1], [8]) != together[1:2]


def test_a_response_ends_with_its_first_end_token(llada, prompts):
    decoded = run(llada, prompts, policy_of())
    eos = decoded.response(0, trim=False)[5]
    decoded.eos_position[0] = len(prompts[0]) + 5
    assert decoded.response(0) == decoded.response(0, trim=False)[:6]
    assert decoded.response(0)[-1] == eos


def test_diagnosis_counts_masks_that_the_cached_forward_did_not_read(llada, prompts):
    plain = run(llada, prompts, policy_of("fixed"), diagnose=True, threshold=0.5).statistics()
    assert 0 < plain["late_ratio"] <= 1
    assert 0 < plain["premature_ratio"] < 1
    cached = run(llada, prompts, policy_of("fixed", "dual"), diagnose=True, threshold=0.5).statistics()
    without = run(llada, prompts, policy_of("fixed", "dual")).statistics()
    assert cached["late_ratio"] > 0
    # The forward beside the run is not counted.
    assert cached["nfe"] == without["nfe"]
    assert cached["forwarded_positions"] == without["forwarded_positions"]


def test_diagnosis_does_not_change_the_run(model, prompts):
    assert run(model, prompts, policy_of("fixed", "dual"), diagnose=True).commits == (
        run(model, prompts, policy_of("fixed", "dual")).commits
    )


def test_a_block_causal_model_is_refused():
    with pytest.raises(ConfigError, match="'tiny' is block-causal"):
        make_batch(tiny().shape, [[1]], 8)


@pytest.mark.parametrize(
    ("prompts", "length", "message"),
    [
        ([], 8, "no prompts"),
        ([[1], []], 8, "prompt 1 is empty"),
        ([[1, 96]], 8, "prompt 0 holds token 96, outside the vocabulary of 96"),
        ([[-1]], 8, "token -1"),
        ([[1]], 0, "response_length must be >= 1"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(llada, prompts, length, message):
    with pytest.raises(ConfigError, match=message):
        make_batch(llada.shape, prompts, length)


@pytest.mark.parametrize("cache", ["dsb-released", "dsb-released-dream", "dual-fast-dllm-dream"])
def test_released_variants_fill_every_response(dream, prompts, cache):
    decoded = run(dream, prompts, policy_of("dsb-const" if cache.startswith("dsb") else "fixed", cache))
    for row in range(len(prompts)):
        assert dream.shape.mask_token_id not in decoded.response(row, trim=False)
    if cache.endswith("dream"):
        # A refreshing forward commits one position, whatever is confident.
        for record in decoded.records:
            assert (record.committed[record.refreshed] == 1).all()


@pytest.mark.cuda
@pytest.mark.parametrize(("scheduler", "cache"), [pair for pair in ALL if pair[0] != "dsb-const"])
def test_a_cuda_device_decodes_what_the_cpu_decodes(llada, prompts, scheduler, cache):
    on_gpu = random_model(llada.shape, seed=3, device="cuda")
    on_gpu.weights.head.mul_(4.0)
    policy = policy_of(scheduler, cache)
    batch = make_batch(llada.shape, prompts, RESPONSE, device="cuda")
    decoded = decode(on_gpu, batch, policy, check=True)
    expected = run(llada, prompts, policy)
    assert decoded.commits == expected.commits
    assert (decoded.tokens.cpu() == expected.tokens).all()


def ending_early(model, prompts, policy):
    """The model with an end token that the first prompt's answer does hold in its middle."""
    whole = decode(model, make_batch(model.shape, prompts, RESPONSE), policy)
    end_token = whole.response(0, trim=False)[RESPONSE // 2]
    return BlockModel(replace(model.shape, eos_token_ids=(end_token,)), model.weights)


@pytest.mark.parametrize(("scheduler", "cache"), [("fixed", "dual"), ("adablock", "prefix"), ("dsb-greedy", "dsb")])
def test_stopping_at_the_eos_changes_no_answer_and_saves_the_rounds_after_it(model, prompts, scheduler, cache):
    policy = policy_of(scheduler, cache)
    ending = ending_early(model, prompts, policy)
    whole, stopped = (run(ending, prompts, policy, stop_at_eos=stop) for stop in (False, True))
    assert int(whole.eos_position[0]) <= len(prompts[0]) + RESPONSE // 2
    rows = range(len(prompts))
    assert [stopped.response(row) for row in rows] == [whole.response(row) for row in rows]
    one, other = stopped.statistics(), whole.statistics()
    assert one["nfe"] == one["nfe_before_eos"] == other["nfe_before_eos"] <= other["nfe"]
    assert one["forwarded_positions"] == other["forwarded_positions_before_eos"]


def test_a_stopped_row_takes_no_part_in_later_rounds(model, prompts):
    # One token a forward: the first prompt's row ends rounds before the others.
    policy = policy_of("fixed", decoder="top1")
    decoded = run(ending_early(model, prompts, policy), prompts, policy, stop_at_eos=True)
    live = [bool(record.live[0]) for record in decoded.records]
    assert 0 < sum(live) < RESPONSE
    assert all(not commits[0] for commits, took_part in zip(decoded.commits, live, strict=True) if not took_part)
