"""DESIGN section 5 and the user cases: EOS, short prompts, literal masks, frozen rows, clean KV, k beyond S."""

from dataclasses import replace

import pytest
import torch

from herald_exec import DecodeRequest, Options, decode
from herald_exec import execution as execution_module
from herald_exec.decoding import DecodeSettings
from herald_exec.decoding.delivery import prompt_problem
from herald_exec.models import forward, tiny
from herald_exec.policy import PlannedPolicy, RulePolicy
from herald_exec.pools import Pools
from herald_exec.requests import check_positions
from herald_pipeline import methods
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError, RunError
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import FixedSteps, ListedSteps

RUNNABLE = [name for name in methods.names() if not methods.get(name).simulated_only]
# ShadowKV keeps values alone in host memory: tests/exec/test_shadow.py looks at them.
OFFLOADED = [name for name in RUNNABLE if name not in ("dense", "shadowkv")]


@pytest.fixture
def full_kv(monkeypatch):
    """What the full pool holds when a run ends: slot -> keys, values ``[layers, kv, S, d]``."""
    held = {}

    class Seen(Pools):
        def close(self):
            if "full" in self.hosts:
                host = self.hosts["full"]
                for slot in range(self.slots):
                    parts = [host.read(layer, slot, host.length(layer, slot)) for layer in range(len(host._lengths))]
                    held[slot] = tuple(torch.stack(part) for part in zip(*parts, strict=True))
            super().close()

    monkeypatch.setattr(execution_module, "Pools", Seen)
    return held


def planned(block, steps):
    plan = steps if hasattr(steps, "steps") else FixedSteps(steps, block)
    return PlannedPolicy(plan, Sampler(mask_token_id=1), order="scripted")


# KV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 40])
def test_every_completed_token_reaches_the_full_pool_once_as_a_prefill_would_compute_it(
    kit, model, full_kv, name, prompt_length
):
    """U13 and DESIGN section 5 point 10, at budget 100%: no gap, no draft left, tail included."""
    request = kit.prompts([prompt_length], 17)[0]
    run = decode(
        kit.describe(name, model.shape, budget=1.0),
        model,
        [request],
        policy=planned(kit.BLOCK, ListedSteps(((1, 3, 2),), 8)),
    )
    blocks = -(-(prompt_length + 17) // kit.BLOCK) * kit.BLOCK
    keys, values = full_kv[0]
    assert keys.shape[2] == blocks
    text = torch.tensor([*request.prompt, *run.answers[0]])
    straight = forward(model, text[None])
    for layer in range(model.shape.num_layers):
        # Behind the last token asked for, the block holds further tokens that the answer does not.
        end = len(text) // kit.BLOCK * kit.BLOCK
        torch.testing.assert_close(keys[layer][:, :end], straight.keys[layer][0][:, :end], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values[layer][:, :end], straight.values[layer][0][:, :end], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OFFLOADED)
def test_below_full_budget_clean_kv_is_that_of_the_same_sets(kit, model, full_kv, name):
    pipeline = kit.describe(name, model.shape, budget=0.05)
    policy = planned(kit.BLOCK, ListedSteps(((1, 3, 2, 4),), 8))
    request = kit.prompts([200], 32)[0]
    run = decode(pipeline, model, [request], policy=policy)
    oracle = kit.Oracle(model, pipeline.settings, policy.plan.steps, model.shape.eos_token_ids)
    assert oracle.decode(request, name) == run.answers[0]
    for layer in range(model.shape.num_layers):
        torch.testing.assert_close(full_kv[0][0][layer], oracle.keys[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(full_kv[0][1][layer], oracle.values[layer], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9])
@pytest.mark.parametrize("new_tokens", [1, 8, 9])
def test_short_prompts_and_short_answers_are_whole(kit, model, prompt_length, new_tokens):
    """U13: a request that ends in its first block, a prompt below one block."""
    request = kit.prompts([prompt_length], new_tokens)[0]
    pipeline = kit.describe("herald", model.shape, budget=0.3)
    policy = planned(kit.BLOCK, 3)
    run = decode(pipeline, model, [request], policy=policy, options=Options(check=True))
    oracle = kit.Oracle(model, pipeline.settings, policy.plan.steps, ())
    assert run.answers[0] == oracle.decode(request, "herald")
    assert len(run.answers[0]) == new_tokens


def test_a_budget_above_everything_selects_everything_and_moves_no_more(kit, model):
    """U14: k beyond the context is the context."""
    request = kit.prompts([40], 16)
    runs = [
        decode(
            kit.describe("herald", model.shape, budget=budget),
            model,
            request,
            policy=planned(8, 3),
            options=Options(keep_trace=True),
        )
        for budget in (1.0, 5.0)
    ]
    assert runs[0].answers == runs[1].answers
    moved = [sum(span.bytes for span in run.trace.spans if span.stage == "upload") for run in runs]
    assert moved[0] == moved[1] > 0


# EOS and frozen rows -------------------------------------------------------------------------------------------------


def eos_model(kit, answer_token):
    """A model whose end token is one that it likes to say."""
    return tiny(block_length=kit.BLOCK, eos_token_ids=(answer_token,))


@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 15, 16, 17])
def test_eos_in_the_prompt_does_not_end_the_answer(kit, prompt_length):
    """U09: the prompt's last token is EOS; its block straddles prompt and answer."""
    model = eos_model(kit, 300)
    plain = tiny(block_length=kit.BLOCK, eos_token_ids=())
    prompt = (*kit.prompts([prompt_length], 1)[0].prompt[:-1], 300)
    answers = [
        decode(
            kit.describe("herald", m.shape, budget=0.5), m, [DecodeRequest(0, prompt, 12)], policy=planned(8, 3)
        ).answers[0]
        for m in (model, plain)
    ]
    assert len(answers[0]) > 0
    # The one difference: the answer is cut behind its own first EOS.
    cut = answers[1].index(300) + 1 if 300 in answers[1] else len(answers[1])
    assert answers[0] == answers[1][:cut]


@pytest.mark.parametrize("policy", list(BatchPolicy))
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_row_that_met_eos_is_frozen_and_its_neighbour_goes_on(kit, model, name, policy):
    """U10: the finished row's answer ends there, and no launch has it after its block."""
    requests = kit.prompts([20, 30], 48)
    options = Options(batch=2, policy=policy, check=True)
    pipeline = kit.describe(name, model.shape, budget=0.3)
    steps = planned(8, ListedSteps(((2, 5), (1, 3)), 8))
    free = decode(pipeline, model, requests, policy=steps, options=options).answers
    token = next(t for t in free[0][:16] if t not in free[1])
    ending = tiny(block_length=8, eos_token_ids=(token,))
    seen = []
    pipeline = kit.describe(name, ending.shape, budget=0.3)
    options = Options(batch=2, policy=policy, check=True, before_stage=lambda launch: seen.append(launch))
    run = decode(pipeline, ending, requests, policy=steps, options=options)
    assert run.answers[0] == free[0][: free[0].index(token) + 1]
    assert run.answers[1] == free[1]
    last = (20 % 8 + free[0].index(token)) // 8
    blocks = {
        block
        for launch in seen
        for g in launch.groups
        for slot, block in zip(g.slots, g.blocks, strict=True)
        if slot == 0
    }
    assert max(blocks) == last
    assert run.result.finished == 2


def test_a_slot_that_is_used_again_starts_clean(kit, model):
    """More requests than slots, the later ones shorter: each answer is what it is alone."""
    requests = kit.prompts([90, 17, 3, 50, 8], [8, 24, 16, 9, 20])
    pipeline = kit.describe("herald", model.shape, budget=0.2)
    policy = planned(8, ListedSteps(((2, 5, 1), (1, 3)), 8))
    for batch_policy in BatchPolicy:
        options = Options(batch=2, check=True, policy=batch_policy)
        together = decode(pipeline, model, requests, policy=policy, options=options).answers
        alone = {r.id: decode(pipeline, model, [r], policy=policy).answers[r.id] for r in requests}
        assert together == alone


def test_a_literal_mask_id_in_the_prompt_is_a_token(kit, model):
    """The prompt's tail holds the mask's id: it stays, and the draft and KV treat it as a token."""
    prompt = (*kit.prompts([10], 1)[0].prompt, 1, 1, 7)
    pipeline = kit.describe("herald", model.shape, budget=0.4)
    policy = planned(8, 4)
    request = DecodeRequest(0, prompt, 14)
    run = decode(pipeline, model, [request], policy=policy, options=Options(check=True))
    oracle = kit.Oracle(model, pipeline.settings, policy.plan.steps, model.shape.eos_token_ids)
    assert run.answers[0] == oracle.decode(request, "herald")
    assert len(run.commits[0][0]) == 3  # three positions of block 0 were open: three steps, not four
    assert 1 not in run.answers[0]


# Policies ------------------------------------------------------------------------------------------------------------


def test_confidences_decide_how_many_steps_a_block_takes(kit, model):
    """The rule over real confidences: a low threshold accepts all at once, an impossible one a token a step."""
    pipeline, requests = kit.describe("herald", model.shape), kit.prompts([16], 16)
    sampler = Sampler(mask_token_id=1)
    for threshold, steps in ((1e-9, 1), (1.0, kit.BLOCK)):
        policy = RulePolicy(acceptance.get("confidence", threshold=threshold), sampler)
        run = decode(pipeline, model, requests, policy=policy)
        assert [len(block) for block in run.commits[0]] == [steps, steps]
        assert all(sum(block) == kit.BLOCK for block in run.commits[0])


def test_fixed_steps_commit_by_confidence_the_remainder_first(kit, model):
    """DESIGN section 5 point 7: floor(B/T), plus one in the first B mod T steps; then one completing forward."""
    pipeline, requests = kit.describe("dense", model.shape), kit.prompts([16], 16)
    run = decode(pipeline, model, requests, policy=PlannedPolicy(FixedSteps(3, 8), Sampler(mask_token_id=1)))
    assert run.commits[0] == [[3, 3, 2], [3, 3, 2]]
    assert run.result.forwards == 2 * (3 + 1)


def test_draws_of_a_request_do_not_depend_on_its_batch(kit, model):
    pipeline, requests = kit.describe("herald", model.shape, budget=0.5), kit.prompts([16, 30], 16)
    policy = RulePolicy(acceptance.get("top1"), Sampler(temperature=0.8, mask_token_id=1), seed=5)
    together = decode(pipeline, model, requests, policy=policy, options=Options(batch=2)).answers
    alone = {r.id: decode(pipeline, model, [r], policy=policy).answers[r.id] for r in requests}
    assert together == alone


# Admission -----------------------------------------------------------------------------------------------------------


def test_a_request_too_large_is_rejected_once_and_the_others_finish(kit, model):
    """U04: the pool has room for 64 tokens; the second request needs 104."""
    requests = kit.prompts([20, 80, 30], 24)
    options = Options(batch=2, kv_tokens=64, check=True)
    run = decode(kit.describe("herald", model.shape), model, requests, policy=planned(8, 2), options=options)
    assert list(run.result.rejected) == [1]
    problem = "request 1: prompt 80 + new 24 = 104 tokens take 104 positions in blocks of 8, the limit is 64"
    assert run.result.rejected[1].startswith(problem)
    assert run.result.finished == 2
    assert sorted(run.answers) == [0, 2]


def test_what_run_rejects_and_generate_refuses_is_one_rule_with_one_text(kit, model):
    """U12: 76 + 4 = 80 positions are within the limit; blocks from the prompt's end on reach 84."""
    shape = replace(model.shape, max_positions=80)
    requests = [kit.prompts([76], 4)[0], replace(kit.prompts([20], 8)[0], id=1)]
    options = Options(batch=2, kv_tokens=80, check=True)
    run = decode(kit.describe("herald", model.shape), model, requests, policy=planned(8, 2), options=options)
    with pytest.raises(ConfigError) as refused:
        check_positions(requests, 8, 80)
    settings = DecodeSettings(make_policy(scheduler_params={"block": 8}, bidirectional=False), max_new_tokens=4)
    asked = prompt_problem(shape, settings, 0, requests[0].prompt)
    assert run.result.finished == 1
    assert run.result.rejected == {0: asked}
    assert str(refused.value) == asked
    assert asked.startswith("request 0: prompt 76 + new 4 = 80 tokens take 84 positions in blocks of 8, the limit is")


def test_requests_that_arrive_later_are_waited_for(kit, model):
    late = DecodeRequest(1, (5, 6, 7), 8, arrival_ns=60_000_000)
    requests = [kit.prompts([9], 8)[0], late]
    run = decode(
        kit.describe("dense", model.shape),
        model,
        requests,
        policy=planned(8, 2),
        options=Options(batch=2, keep_trace=True),
    )
    prefills = [span for span in run.trace.spans if span.stage == "prefill" and span.layer == 0]
    assert run.result.finished == 2
    assert prefills[-1].start_ns >= 60_000_000


# Checks --------------------------------------------------------------------------------------------------------------


def test_exact_layers_must_leave_one_to_select_for(kit, model):
    with pytest.raises(ConfigError, match="exact_layers must be < 4"):
        decode(kit.describe("herald", model.shape, exact_layers=4), model, kit.prompts([9], 8))


def test_a_bidirectional_model_is_refused(kit):
    model = tiny(block_length=8, attention="bidirectional")
    with pytest.raises(ConfigError, match="bidirectional model"):
        decode(kit.describe("dense", model.shape), model, kit.prompts([9], 8))


def test_an_entry_written_over_is_caught_by_the_position_check(kit, model, monkeypatch):
    """A double that uploads to the active buffer: the check names pool, layer and block."""
    from herald_exec import retrieval
    from herald_exec.session import ACTIONS

    real = retrieval.write_selected

    def wrong(session, task, rows, kv, positions):
        shifted = positions + 1
        real(session, task, rows, kv, shifted)

    monkeypatch.setattr(retrieval, "write_selected", wrong)
    assert "upload" in ACTIONS
    with pytest.raises(RunError, match=r"pool 'sparse', layer 2: a position stands twice or out of order"):
        decode(
            kit.describe("herald", model.shape, budget=1.0),
            model,
            kit.prompts([40], 24),
            policy=planned(8, 3),
            options=Options(check=True),
        )


def test_an_undeclared_access_is_refused(kit, model):
    """The hazard check only knows what a stage declares, so an action may touch nothing else."""
    from dataclasses import replace

    from herald_pipeline.errors import PipelineError  # noqa: F401 - what it is inside

    pipeline = kit.describe("herald", model.shape)
    stage = replace(pipeline.template.denoise, drafts=())
    broken = replace(pipeline, template=replace(pipeline.template, denoise=stage))
    with pytest.raises(RunError, match="writing the draft's KV is not among the accesses that the stage declares"):
        decode(broken, model, kit.prompts([40], 24), policy=planned(8, 3))
