"""Block-causal decoding against a decoder written for this test: one row, no cache, no batch, whole forwards."""

from dataclasses import replace

import pytest
import torch

from herald_exec.decoding import DecodeSettings
from herald_exec.models import BlockModel, forward
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.errors import ConfigError


def policy(block, threshold=0.9, **options):
    return make_policy(
        scheduler_params={"block": block}, decoder_params={"threshold": threshold}, bidirectional=False, **options
    )


def reference(model, prompt, block, threshold, max_new):
    """Confidence decoding from the definition; the answer is cut at the first end token."""
    mask, ends = model.shape.mask_token_id, set(model.shape.eos_token_ids)
    total = -(-(len(prompt) + max_new) // block) * block
    tokens = list(prompt) + [None] * (total - len(prompt))
    for start in range(len(prompt) // block * block, total, block):
        while None in tokens[start : start + block]:
            ids = torch.tensor([[mask if t is None else t for t in tokens[: start + block]]])
            logits = model.logits(forward(model, ids, block=block).hidden[0])
            open_ = [i for i in range(start, start + block) if tokens[i] is None]
            probability = logits[open_].softmax(-1)
            allowed = logits[open_].clone()
            allowed[:, mask] = float("-inf")
            token = allowed.argmax(-1)
            sure = probability.gather(1, token[:, None])[:, 0]
            best = int(sure.argmax())
            for i, position in enumerate(open_):
                if sure[i] >= threshold or i == best:
                    tokens[position] = int(token[i])
        answer = tokens[len(prompt) : start + block]
        if ends & set(answer):
            answer = answer[: min(answer.index(end) for end in ends if end in answer)]
            return answer[:max_new]
    return tokens[len(prompt) : len(prompt) + max_new]


@pytest.mark.parametrize("threshold", [0.3, 0.9, 1.0])
def test_a_batch_of_ragged_rows_gives_each_row_its_own_answer(causal_model, prompts, run, threshold):
    tokens, _, _ = run(causal_model, prompts, DecodeSettings(policy(8, threshold), max_new_tokens=21))
    assert tokens == [reference(causal_model, prompt, 8, threshold, 21) for prompt in prompts]
    assert len({tuple(row) for row in tokens}) > len(prompts) // 2


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_slot_is_reused_without_a_trace_of_the_answer_before(causal_model, prompts, run, batch_size):
    settings = DecodeSettings(policy(8), max_new_tokens=21)
    assert run(causal_model, prompts, settings, batch_size=batch_size) == run(causal_model, prompts, settings)


@pytest.mark.parametrize("method", ["dense", "herald", "mage-offload", "mage-cpu", "herald-no-draft"])
def test_every_method_gives_the_reference_answer_at_full_budget(causal_model, prompts, run, method):
    settings = DecodeSettings(policy(8), max_new_tokens=21, method=method, method_settings={"budget": 1.0})
    tokens, _, _ = run(causal_model, prompts, settings)
    assert tokens == [reference(causal_model, prompt, 8, 0.9, 21) for prompt in prompts]


def test_experts_decode_as_the_reference_does(causal_experts, prompts, run):
    tokens, _, _ = run(causal_experts, prompts[:4], DecodeSettings(policy(4), max_new_tokens=9))
    assert tokens == [reference(causal_experts, prompt, 4, 0.9, 9) for prompt in prompts[:4]]


def test_confident_rows_take_fewer_forwards_and_no_row_waits_for_another(causal_model, prompts, run):
    slow = run(causal_model, prompts, DecodeSettings(policy(8, 1.0), max_new_tokens=24))[2]
    fast = run(causal_model, prompts, DecodeSettings(policy(8, 0.3), max_new_tokens=24))[2]
    assert sum(row.forwards for row in fast) < sum(row.forwards for row in slow)
    for row, prompt in enumerate(prompts):
        assert run(causal_model, [prompt], DecodeSettings(policy(8, 0.3), max_new_tokens=24))[2] == [fast[row]]


def test_one_token_a_step_costs_b_forwards_and_the_one_that_writes_clean_kv(causal_model, run):
    """Threshold 1 accepts the best alone."""
    settings = DecodeSettings(policy(8, 1.0), max_new_tokens=24, end_token_ids=())
    _, _, (counts,) = run(causal_model, [[5] * 8], settings)
    assert (counts.forwards, counts.blocks, counts.tokens) == (3 * (8 + 1), 3, 24)


def test_an_end_token_in_the_prompt_ends_nothing(causal_model, run):
    for length in (1, 7, 8, 9, 15, 16, 17):
        prompt = [5] * (length - 1) + [0]
        settings = DecodeSettings(policy(8), max_new_tokens=8, end_token_ids=(0,))
        tokens, reasons, _ = run(causal_model, [prompt], settings)
        assert tokens == [reference(causal_model, prompt, 8, 0.9, 8)]
        assert reasons[0] in ("length", "end_token")


def test_an_answer_ends_before_its_first_end_token(causal_model, run):
    free, _, _ = run(causal_model, [[9, 9]], DecodeSettings(policy(8), max_new_tokens=30, end_token_ids=()))
    end = free[0][10]
    settings = DecodeSettings(policy(8), max_new_tokens=30, end_token_ids=(end,))
    cut, reasons, _ = run(causal_model, [[9, 9]], settings)
    assert cut[0] == free[0][: free[0].index(end)]
    assert reasons == ["end_token"]


def test_the_answer_holds_at_most_the_tokens_asked_for(causal_model, run):
    for number in (1, 7, 8, 9, 20):
        settings = DecodeSettings(policy(8), max_new_tokens=number, end_token_ids=())
        tokens, reasons, _ = run(causal_model, [[7] * 3], settings)
        assert len(tokens[0]) == number
        assert reasons == ["length"]


def test_a_stopped_row_leaves_the_others_as_they_were(causal_model, prompts, run):
    settings = DecodeSettings(policy(8), max_new_tokens=24, end_token_ids=())
    expected, _, _ = run(causal_model, prompts[:3], settings)
    tokens, reasons, counts = run(causal_model, prompts[:3], settings, stop_at=1)
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert reasons[1] is None
    assert counts[1].blocks == 1


def test_the_same_seed_draws_the_same_answers_in_any_batch(causal_model, prompts, run):
    def answers(seed, batch_size=8):
        settings = DecodeSettings(policy(8), max_new_tokens=16, temperature=1.5, seed=seed, end_token_ids=())
        return run(causal_model, prompts, settings, batch_size=batch_size)[0]

    assert answers(1) == answers(1) == answers(1, batch_size=2)
    assert answers(1) != answers(2)


def test_a_prompt_that_fits_only_without_rounding_is_refused_with_both_lengths(causal_model, run):
    """User case U12: 80 + 20 is within 100 positions, but the last block of 8 ends at 104."""
    model = BlockModel(replace(causal_model.shape, max_positions=100), causal_model.weights)
    settings = DecodeSettings(policy(8), max_new_tokens=20)
    run(model, [[5] * 72], settings)
    with pytest.raises(ConfigError) as caught:
        run(model, [[5] * 80], settings)
    expected = "request 0: prompt 80 + new 20 = 100 tokens take 104 positions in blocks of 8, the limit is 100"
    assert str(caught.value).startswith(expected)


def test_every_prompt_that_cannot_run_is_named(causal_model, run):
    with pytest.raises(ConfigError) as caught:
        run(causal_model, [[1], [2, 64], []], DecodeSettings(policy(8)))
    assert caught.value.problems == [
        "prompt 1: token id 64 is outside the vocabulary of 64",
        "prompt 2 is empty; give it at least one token",
    ]


@pytest.mark.parametrize("decoder", ["static", "top1", "entropy", "confidence-sdar"])
def test_other_decoders_finish_every_block(causal_model, prompts, run, decoder):
    chosen = make_policy(decoder, scheduler_params={"block": 8}, bidirectional=False, steps=3)
    tokens, _, _ = run(causal_model, prompts, DecodeSettings(chosen, max_new_tokens=16, end_token_ids=()))
    assert [len(row) for row in tokens] == [16] * len(prompts)


def test_fixed_steps_take_t_plus_one_forwards_a_block(causal_model, run):
    chosen = make_policy("static", scheduler_params={"block": 8}, bidirectional=False, steps=3)
    _, _, (counts,) = run(causal_model, [[5] * 8], DecodeSettings(chosen, max_new_tokens=16, end_token_ids=()))
    assert counts.forwards == 2 * (3 + 1)
