"""A window that slides over HERALD's pools, by the executor: HERALD where it cannot slide, else the study's rule."""

import random
import time
from dataclasses import replace

import pytest

from herald_exec import Options, decode
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.rules import get_rule
from herald_exec.evaluation.sliding import Slide, Sliding
from herald_exec.models import random_model, tiny, tiny_shape
from herald_exec.policy import PlannedPolicy, RulePolicy
from herald_exec.reference import read_shipped_material
from herald_exec.reference.tasks import draw_samples
from herald_exec.requests import DecodeRequest
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError
from herald_pipeline.pipeline import build
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import ListedSteps

SLIDES = [Slide(8, 32), Slide(16, 32), Slide(32, 64)]
THRESHOLD = 0.002
"""Low enough for random weights to accept several tokens a step."""


def sure(mask_token_id=1, decoder="confidence", **params):
    return RulePolicy(acceptance.get(decoder, **params), Sampler(mask_token_id=mask_token_id))


def describe(shape, slide, budget, queries=1, **settings):
    sizes = {"block_length": slide.stride, "window_blocks": slide.window // slide.stride, "queries": queries}
    return build(shape, "herald-sliding", budget=budget, kv_dtype="fp32", dram_kv_dtype="fp32", **(sizes | settings))


@pytest.fixture(scope="module")
def large():
    # Blocks of 32 as in the study, and no end token, so that random weights decode every block.
    return random_model(tiny_shape(vocab_size=4096, num_layers=3, eos_token_ids=(4095,)), seed=3)


@pytest.fixture(scope="module")
def prompts(large):
    return Prompts(large, list(draw_samples(read_shipped_material(), "hop", 256, 3, first_seed=70)))


@pytest.fixture(scope="module")
def requests(prompts):
    return [DecodeRequest(i, sample.prompt, prompts.longest) for i, sample in enumerate(prompts.samples)]


@pytest.mark.parametrize("policy", list(BatchPolicy))
@pytest.mark.parametrize("accepts", ["planned", "sure"])
def test_a_window_of_one_block_gives_heralds_tokens(kit, model, accepts, policy):
    steps = PlannedPolicy(ListedSteps(((1, 3, 8), (2, 5, 1)), kit.BLOCK), Sampler(mask_token_id=1))
    chosen = steps if accepts == "planned" else sure(threshold=0.01)
    requests, options = kit.prompts([40, 21, 64], [32, 24, 17]), Options(batch=2, check=True, policy=policy)
    runs = [
        decode(kit.describe(name, model.shape, budget=0.3, **settings), model, requests, policy=chosen, options=options)
        for name, settings in (("herald", {}), ("herald-sliding", {"window_blocks": 1}))
    ]
    assert runs[0].answers == runs[1].answers
    assert runs[0].commits == runs[1].commits
    assert runs[0].checksums == runs[1].checksums


@pytest.mark.parametrize("slide", SLIDES, ids=lambda slide: slide.name)
@pytest.mark.parametrize("rule", ["herald", "herald-32q"])
def test_tokens_and_steps_are_those_of_the_studys_rule(large, prompts, requests, slide, rule):
    """Which a reference without a cache holds to (tests/exec/evaluation); pools, threads and slots change nothing."""
    expected = Sliding(prompts, get_rule(rule), 0.1, slide, threshold=THRESHOLD).run()
    queries = 1 if rule == "herald" else slide.window
    pipeline = describe(large.shape, slide, 0.1, queries)
    for policy in BatchPolicy:
        options = Options(batch=2, check=True, policy=policy)
        run = decode(pipeline, large, requests, policy=sure(threshold=THRESHOLD), options=options)
        assert [run.answers[request.id] for request in requests] == expected.answers
        assert [[len(steps) for steps in run.commits[request.id]] for request in requests] == expected.steps
    assert sum(expected.ahead) > 0


@pytest.mark.parametrize("slide", SLIDES, ids=lambda slide: slide.name)
def test_a_budget_of_all_gives_the_tokens_of_a_sliding_dense(large, prompts, requests, slide):
    dense = Sliding(prompts, get_rule("dense"), 1.0, slide, threshold=THRESHOLD).run()
    run = decode(
        describe(large.shape, slide, 1.0),
        large,
        requests,
        policy=sure(threshold=THRESHOLD),
        options=Options(batch=3, check=True),
    )
    assert [run.answers[request.id] for request in requests] == dense.answers


@pytest.mark.parametrize("stride", [2, 4])
def test_any_prompt_length_and_slot_gives_what_the_request_gives_alone(kit, model, stride):
    requests = kit.prompts([90, 17, 3, 50, 8], [8, 24, 16, 9, 20])
    pipeline, accepts = describe(model.shape, Slide(stride, 8), 0.2), sure(threshold=0.01)
    alone = {r.id: decode(pipeline, model, [r], policy=accepts).answers[r.id] for r in requests}
    for policy in BatchPolicy:
        options = Options(batch=2, check=True, policy=policy)
        assert decode(pipeline, model, requests, policy=accepts, options=options).answers == alone
    assert [len(alone[r.id]) for r in requests] == [8, 24, 16, 9, 20]


def test_delays_and_threads_change_neither_tokens_nor_pools(kit):
    model = tiny(block_length=8, num_layers=3, hidden_size=32, intermediate_size=32, vocab_size=64, eos_token_ids=())
    requests = kit.prompts([19, 9, 26], [8, 12, 8], vocab=64)
    pipeline, accepts = describe(model.shape, Slide(4, 8), 0.3, exact_layers=1), sure(threshold=0.05)

    def run(seed, policy, threads):
        draw = random.Random(seed)

        def delay(_launch):
            if seed:
                time.sleep(draw.choice((0, 0, 0, 1e-4, 3e-4, 1e-3)))

        options = Options(batch=2, check=True, policy=policy, threads=threads, before_stage=delay)
        return decode(pipeline, model, requests, policy=accepts, options=options)

    for policy in BatchPolicy:
        still = run(0, policy, 1)
        for seed in range(1, 9):
            shaken = run(seed, policy, 1 + seed % 2)
            assert shaken.answers == still.answers
            assert shaken.checksums == still.checksums


@pytest.mark.parametrize("decoder", ["top1", "entropy", "confidence-llada2", "factor-fast-dllm"])
def test_every_acceptance_rule_fills_the_answer(kit, model, decoder):
    pipeline = describe(model.shape, Slide(4, 8), 0.3)
    run = decode(pipeline, model, kit.prompts([40], 24), policy=sure(decoder=decoder), options=Options(check=True))
    assert len(run.answers[0]) == 24


def test_a_rule_that_takes_one_token_a_step_takes_none_ahead_of_need(kit, model):
    """Where the period is complete nothing has to be taken, so that a step beside it commits nothing."""
    pipeline = describe(model.shape, Slide(4, 8), 0.3)
    run = decode(pipeline, model, kit.prompts([40], 24), policy=sure(decoder="top1"), options=Options(check=True))
    counts = [count for steps in run.commits[0] for count in steps]
    assert set(counts) <= {0, 1}
    assert all(steps == [0] for steps in run.commits[0] if 0 in steps)
    assert sum(counts) >= 24


def test_a_plan_commits_nothing_ahead(kit, model):
    pipeline = describe(model.shape, Slide(4, 8), 0.3)
    policy = PlannedPolicy(ListedSteps(((2,),), 4), Sampler(mask_token_id=1))
    run = decode(pipeline, model, kit.prompts([40], 24), policy=policy, options=Options(check=True))
    assert run.commits[0] == [[2, 2]] * 6


def test_bytes_of_every_copy_and_selection_are_the_descriptions(kit, model):
    pipeline = describe(model.shape, Slide(4, 8), 0.3)
    options = Options(batch=2, keep_trace=True)
    run = decode(pipeline, model, kit.prompts([40, 21], 24), policy=sure(threshold=0.01), options=options)
    spans = [span for span in run.trace.spans if span.stage in ("draft_down", "append", "select", "gather", "upload")]
    assert len(spans) > 40
    assert all(span.bytes == span.expected_bytes for span in spans)


def test_a_stride_that_does_not_divide_the_models_block_is_refused(kit, model):
    with pytest.raises(ConfigError, match="block_length 3, the window's stride, must divide 8"):
        decode(describe(model.shape, Slide(3, 6), 0.3), model, kit.prompts([9], 6))


def test_what_a_stride_below_the_models_block_changes_is_the_clean_kv(kit, model):
    """The prompt's blocks stay the model's own: before the first commit both strides decode alike."""
    request = kit.prompts([48], 8)
    planned = PlannedPolicy(ListedSteps(((1,),), 8), Sampler(mask_token_id=1))
    fixed = decode(kit.describe("herald", model.shape, budget=0.4), model, request, policy=planned)
    slid = decode(
        describe(model.shape, Slide(4, 8), 0.4), model, request, policy=replace(planned, plan=ListedSteps(((1,),), 4))
    )
    assert slid.answers[0][:4] == fixed.answers[0][:4]
