"""Sliding windows over the study's pools: of one block, they are the block decoder; others follow a reference."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.rules import get_rule
from herald_exec.evaluation.sliding import Slide, Sliding
from herald_exec.evaluation.study import Study
from herald_exec.models import random_model
from herald_exec.reference.tasks import Sample
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError

B, MASK, END = 32, 1, 0
SMALL = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 4096,
    "mask_token_id": MASK,
    "eos_token_ids": (END,),
    "max_positions": 512,
}
SLIDES = [Slide(32, 32), Slide(8, 32), Slide(16, 32), Slide(16, 64), Slide(32, 64), Slide(32, 96)]
# One worker has them all: what they compare with is run once.
pytestmark = pytest.mark.xdist_group("sliding windows")
AHEAD = ["herald", "herald-32q", "herald-no-draft", "representative"]


@pytest.fixture(scope="module")
def model():
    model = random_model(replace(catalogue.get("tiny"), **SMALL), seed=5)
    # Sharp enough that a threshold of .5 divides the positions.
    model.weights.head.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 4096, (3, 64), generator=generator).tolist()
    return [Sample("log", 64, number, tuple(prompt), (), ("x",)) for number, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def prompts(model, samples):
    return Prompts(model, samples)


def slid(prompts, rule, budget, slide):
    return Sliding(prompts, get_rule(rule), budget, slide, threshold=0.5).run()


@pytest.fixture(scope="module")
def with_dense(prompts):
    """Dense's run under a slide: one for all that compare with it."""
    return cache(lambda slide: slid(prompts, "dense", 1.0, slide))


@pytest.mark.parametrize(("rule", "budget"), [("dense", 1.0), ("recency", 0.2), *((name, 0.2) for name in AHEAD)])
def test_a_stride_and_a_window_of_one_block_are_the_block_decoder(prompts, rule, budget):
    found, fixed = slid(prompts, rule, budget, Slide(B, B)), Study(prompts, get_rule(rule), budget, threshold=0.5).run()
    assert (found.answers, found.steps) == (fixed.answers, fixed.steps)
    assert (found.scan_bytes, found.selections) == (fixed.scan_bytes, fixed.selections)
    assert any(steps not in (1, B) for row in found.steps for steps in row)


@pytest.mark.parametrize("slide", SLIDES, ids=lambda slide: slide.name)
@pytest.mark.parametrize("rule", AHEAD)
def test_a_budget_of_everything_is_the_same_window_with_dense_attention(prompts, with_dense, rule, slide):
    found, dense = slid(prompts, rule, 1.0, slide), with_dense(slide)
    assert (found.answers, found.steps, found.ahead) == (dense.answers, dense.steps, dense.ahead)


def best_of(model, line, ends):
    """Probability and token of each position, one forward of the whole line; position p sees those before ends[p]."""
    place = torch.arange(len(line))
    seen = place[None, :] < torch.tensor(ends)[:, None]
    hidden = model.embed(torch.tensor([MASK if token is None else token for token in line]))
    rotary = model.rotary(place)
    for layer in range(model.shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)
        keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for part in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        hidden = model.finish(layer, hidden, (weights @ values).transpose(0, 1).flatten(1))
    probability = model.logits(hidden).float().softmax(-1)
    probability[:, MASK] = 0.0
    return tuple(part.tolist() for part in probability.max(-1))


def reference(model, prompt, answer_tokens, slide, threshold):
    """One row without any cache: everything from the whole line, each position with the end of what it may see."""
    stride, window = slide.stride, slide.window
    line = list(prompt) + [None] * (answer_tokens - stride + window)
    ends = [(p // B + 1) * B for p in range(len(prompt))]
    steps, ahead = [], []
    for start in range(len(prompt), len(prompt) + answer_tokens, stride):
        span = range(start, start + window)
        in_window = [start + ((p - start) // B + 1) * B for p in span]
        count = 0
        ahead.append(all(line[p] is not None for p in span[:stride]))
        while True:
            incomplete = any(line[p] is None for p in span[:stride])
            if count and not incomplete:
                break
            sure, token = best_of(model, line[: span.stop], ends + in_window)
            masked = [p for p in span if line[p] is None]
            best = max(masked, key=lambda p: sure[p]) if incomplete else None
            for p in masked:
                if sure[p] >= threshold or p == best:
                    line[p] = token[p]
            count += 1
        completing = [start + stride] * stride + in_window[stride:]
        sure, token = best_of(model, line[: span.stop], ends + completing)
        for p in span:
            if line[p] is None and sure[p] >= threshold:
                line[p] = token[p]
        ends += [start + stride] * stride
        steps.append(count)
    return line[len(prompt) : len(prompt) + answer_tokens], steps, ahead


@pytest.mark.parametrize("slide", SLIDES, ids=lambda slide: slide.name)
def test_dense_windows_decode_as_a_reference_without_a_cache_does(model, samples, prompts, with_dense, slide):
    found = with_dense(slide)
    for row, sample in enumerate(samples):
        tokens, steps, ahead = reference(model, sample.prompt, prompts.longest, slide, 0.5)
        periods = len(found.steps[row])
        end = tokens.index(END) if END in tokens else len(tokens)
        assert found.answers[row] == tokens[:end]
        assert found.steps[row] == steps[:periods]
        assert found.ahead[row] == sum(ahead[:periods])


@pytest.mark.parametrize("rule", ["dense", "herald", "herald-32q"])
@pytest.mark.parametrize("slide", [Slide(8, 32), Slide(32, 64)], ids=lambda slide: slide.name)
def test_a_batch_equals_its_rows_alone(model, samples, prompts, rule, slide):
    together = slid(prompts, rule, 0.2, slide)
    alone = [slid(Prompts(model, [sample]), rule, 0.2, slide) for sample in samples]
    assert together.answers == [one.answers[0] for one in alone]
    assert together.steps == [one.steps[0] for one in alone]


def test_windows_do_commit_ahead_of_their_period(prompts):
    # Otherwise they would be fixed blocks at a higher price.
    assert sum(slid(prompts, "dense", 1.0, Slide(8, 32)).ahead) > 0


def test_selections_are_one_a_period_and_none_for_the_last(prompts, model):
    found = slid(prompts, "herald", 0.2, Slide(16, 32))
    assert found.selections == [len(steps) - 1 for steps in found.steps]
    # The query stands at the next window's centre, 32 behind the period's start: the whole draft is before it.
    prefixes = [64 + 16 * period for period in range(len(found.steps[0]) - 1)]
    rule = get_rule("herald")
    assert found.scan_bytes[0] == sum(rule.scan_bytes(model.shape, s, int(0.2 * s), 32) for s in prefixes)


@pytest.mark.parametrize(
    ("rule", "slide", "tokens"),
    [("herald", (8, 32), 24), ("herald", (32, 32), 32), ("herald", (32, 64), 64), ("herald-32q", (8, 32), 8)],
)
def test_a_selection_reads_the_draft_up_to_its_first_query(prompts, rule, slide, tokens):
    assert Sliding(prompts, get_rule(rule), 0.1, Slide(*slide)).draft_tokens == tokens


@pytest.mark.parametrize("change", [{"clean": "window"}, {"sight": "stride"}])
def test_the_other_readings_of_a_window_are_other_readings(prompts, change):
    ours = slid(prompts, "dense", 1.0, Slide(8, 32))
    other = slid(prompts, "dense", 1.0, Slide(8, 32, **change))
    assert other.answers != ours.answers or other.steps != ours.steps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slide(0, 32), "stride must be >= 1"),
        (lambda: Slide(8, 20), "window must be a multiple of the stride, got 20 and 8"),
        (lambda: Slide(8, 32, clean="none"), "clean must be alone or window, got 'none'"),
        (lambda: Slide(8, 32, sight="none"), "sight must be block or stride, got 'none'"),
    ],
)
def test_an_impossible_slide_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_cannot_slide_is_refused(prompts):
    with pytest.raises(ConfigError, match="selects in a block's own first step"):
        Sliding(prompts, get_rule("mage-offload"), 0.1, Slide(8, 32))
    with pytest.raises(ConfigError, match="stride 12 does not divide the model's block of 32"):
        Sliding(prompts, get_rule("herald"), 0.1, Slide(12, 36))
