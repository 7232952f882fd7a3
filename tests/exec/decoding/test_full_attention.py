"""Full-attention decoding against a decoder written for this test: one row, whole forwards, no cache."""

import pytest
import torch

from herald_exec.decoding import DecodeSettings
from herald_exec.models import forward
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.errors import ConfigError

THRESHOLD = 0.9


def make(scheduler="fixed", cache="none", block=8, decoder="confidence", cache_params=None, **params):
    decoder_params = {"threshold": THRESHOLD} if decoder == "confidence" else {}
    sizes = {"block": block} if scheduler in ("fixed", "adablock") else params
    return make_policy(
        decoder, scheduler, cache, scheduler_params=sizes, decoder_params=decoder_params, cache_params=cache_params
    )


def predictions(model, tokens):
    """Chosen token and its probability at every position of one row, from a whole forward."""
    mask = model.shape.mask_token_id
    logits = model.logits(forward(model, torch.tensor([tokens])).hidden[0])
    if model.shape.shifted_logits:
        logits = torch.cat((logits[:1], logits[:-1]))
    allowed = logits.clone()
    allowed[:, mask] = float("-inf")
    token = allowed.argmax(-1)
    return token.tolist(), logits.softmax(-1).gather(1, token[:, None])[:, 0].tolist()


def reference(model, prompt, max_new, block=8):
    """LLaDA's semi-autoregressive decoding with a threshold and the best one always."""
    mask = model.shape.mask_token_id
    tokens = list(prompt) + [None] * max_new
    rounds = 0
    for start in range(len(prompt), len(tokens), block):
        span = range(start, min(start + block, len(tokens)))
        while any(tokens[i] is None for i in span):
            token, sure = predictions(model, [mask if t is None else t for t in tokens])
            rounds += 1
            open_ = [i for i in span if tokens[i] is None]
            best = max(open_, key=lambda i: sure[i])
            for i in open_:
                if sure[i] >= THRESHOLD or i == best:
                    tokens[i] = token[i]
    return tokens[len(prompt) :], rounds


def answers(model, prompts, policy, run, max_new=20, ends=(), **options):
    settings = DecodeSettings(policy, max_new_tokens=max_new, end_token_ids=ends)
    tokens, _, counts = run(model, prompts, settings, **options)
    return tokens, counts


def test_without_cache_ragged_rows_decode_as_the_reference_does(full_model, prompts, run):
    tokens, counts = answers(full_model, prompts, make(), run)
    for row, prompt in enumerate(prompts):
        expected, rounds = reference(full_model, prompt, 20)
        assert tokens[row] == expected
        assert counts[row].forwards == rounds


def test_dsb_without_cache_follows_algorithm_one(full_model, prompts, run):
    """s: leftmost mask; e = min(prompt + S_init + U, s + S_max, end), after each round (DSB Algorithm 1)."""
    tokens, _ = answers(full_model, prompts[:5], make("dsb-const", s_init=6), run, max_new=15)
    mask = full_model.shape.mask_token_id
    for row, prompt in enumerate(prompts[:5]):
        end, row_tokens = len(prompt) + 15, list(prompt) + [None] * 15
        s, e, total = len(prompt), len(prompt) + 6, 0
        while None in row_tokens:
            token, sure = predictions(full_model, [mask if t is None else t for t in row_tokens])
            open_ = [i for i in range(s, e) if row_tokens[i] is None]
            best = max(open_, key=lambda i: sure[i])
            for i in open_:
                if sure[i] >= THRESHOLD or i == best:
                    row_tokens[i] = token[i]
                    total += 1
            s = next((i for i in range(s, e) if row_tokens[i] is None), e)
            e = min(len(prompt) + 6 + total, s + 6, end)
        assert tokens[row] == row_tokens[len(prompt) :]


def test_a_window_over_everything_makes_the_dsb_cache_exact(full_model, prompts, run):
    whole = {"prefix_window": 10**6, "suffix_window": 10**6}
    exact, _ = answers(full_model, prompts, make("dsb-const", s_init=6), run)
    cached, _ = answers(full_model, prompts, make("dsb-const", "dsb", s_init=6, cache_params=whole), run)
    assert cached == exact


@pytest.mark.parametrize("cache", ["prefix", "dual", "dkv", "dsb"])
@pytest.mark.parametrize("scheduler", ["fixed", "adablock", "dsb-const", "dsb-greedy"])
def test_every_cache_and_scheduler_fills_every_answer(full_model, prompts, run, cache, scheduler):
    params = {} if scheduler in ("fixed", "adablock") else {"s_init": 6}
    policy = make(scheduler, cache, **params)
    tokens, _ = answers(full_model, prompts, policy, run)
    assert [len(row) for row in tokens] == [20] * len(prompts)
    assert all(full_model.shape.mask_token_id not in row for row in tokens)
    alone, _ = answers(full_model, prompts[3:4], policy, run)
    assert alone[0] == tokens[3]


def test_an_answer_stops_at_its_first_end_token_and_is_the_same_up_to_there(full_model, prompts, run):
    free, _ = answers(full_model, prompts, make(), run)
    end = free[0][9]
    cut, counts = answers(full_model, prompts, make(), run, ends=(end,))
    for row, tokens in enumerate(free):
        assert cut[row] == (tokens[: tokens.index(end)] if end in tokens else tokens)
    assert counts[0].forwards < reference(full_model, prompts[0], 20)[1]


def test_dkv_greedy_with_a_random_order_fills_every_answer(full_model, prompts, run):
    tokens, _ = answers(full_model, prompts, make("fixed", "dkv-greedy", decoder="random"), run)
    assert [len(row) for row in tokens] == [20] * len(prompts)


def test_batches_of_any_size_give_the_same_answers(full_model, prompts, run):
    policy = make("dsb-const", "dsb", s_init=6)
    assert answers(full_model, prompts, policy, run, batch_size=3) == answers(full_model, prompts, policy, run)


def test_a_stopped_row_leaves_the_others_as_they_were(full_model, prompts, run):
    free, _ = answers(full_model, prompts, make(), run)
    tokens, counts = answers(full_model, prompts, make(), run, stop_at=2)
    assert tokens[:2] + tokens[3:] == free[:2] + free[3:]
    assert len(tokens[2]) < 20
    assert counts[2].forwards < counts[3].forwards


def test_offloading_methods_are_for_block_causal_models(full_model, run):
    with pytest.raises(ConfigError, match="no method but 'dense', with a cache; got 'herald'"):
        run(full_model, [[5]], DecodeSettings(make(), method="herald"))
