"""Every method's tokens equal the slow decoder's, whatever T is and however rows are mixed."""

import random

import pytest
import torch

from herald_exec import Options, decode
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_pipeline import methods
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import ListedSteps

RUNNABLE = [name for name in methods.names() if not methods.get(name).simulated_only]


def scripted(rows, block):
    return PlannedPolicy(ListedSteps(rows, block), Sampler(mask_token_id=1), order="scripted")


def compare(kit, model, name, requests, rows, budget=0.3, options=None, **settings):
    """Decode in a batch and one by one with the oracle; both answers."""
    pipeline = kit.describe(name, model.shape, budget=budget, **settings)
    policy = scripted(rows, model.shape.block_length)
    run = decode(pipeline, model, requests, policy=policy, options=options or Options(batch=len(requests), check=True))
    oracle = kit.Oracle(model, pipeline.settings, policy.plan.steps, model.shape.eos_token_ids)
    return run.answers, {request.id: oracle.decode(request, name) for request in requests}


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_number_of_steps_gives_the_slow_decoders_tokens(kit, model, name):
    """One row whose blocks take 1, 2, .. B steps, and back."""
    order = (*range(1, kit.BLOCK + 1), 1, kit.BLOCK, 2, 1)
    ours, slow = compare(kit, model, name, kit.prompts([83], kit.BLOCK * len(order)), (order,))
    assert ours == slow


@pytest.mark.parametrize("policy", list(BatchPolicy))
@pytest.mark.parametrize("name", RUNNABLE)
def test_rows_that_mix_steps_lengths_and_slots_give_the_slow_decoders_tokens(kit, model, name, policy):
    """Five requests through three slots: no prompt block at all, whole blocks, tails; T drawn for every block."""
    draw = random.Random(7)
    rows = tuple(tuple(draw.randint(1, kit.BLOCK) for _ in range(5)) for _ in range(5))
    requests = kit.prompts([5, 64, 71, 33, 100], [30, 8, 1, 37, 24])
    options = Options(batch=3, check=True, policy=policy)
    ours, slow = compare(kit, model, name, requests, rows, options=options)
    assert ours == slow


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "dense"])
def test_a_budget_of_all_gives_the_tokens_of_dense(kit, model, name):
    rows = ((1, 3, 8), (2, 5, 1), (8,))
    requests = kit.prompts([40, 21, 64], 32)
    policy, options = scripted(rows, kit.BLOCK), Options(batch=3, check=True)
    answers = [
        decode(kit.describe(method, model.shape, budget=1.0), model, requests, policy=policy, options=options).answers
        for method in (name, "dense")
    ]
    assert answers[0] == answers[1]


def test_blocks_of_32_take_few_and_many_steps(kit):
    model = tiny(block_length=32, num_layers=3, eos_token_ids=())
    steps = (1, 2, 3, 7, 16, 31, 32, 1)
    ours, slow = compare(kit, model, "herald", kit.prompts([70], 32 * len(steps) - 6), (steps,), budget=0.05)
    assert ours == slow


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_batch_gives_what_each_request_gives_alone(kit, model, name):
    """U11: prompts of 5, 32, 33 and 70 tokens."""
    requests = kit.prompts([5, 32, 33, 70], 20)
    pipeline = kit.describe(name, model.shape, budget=0.2)
    policy = scripted(((2, 4), (8, 1, 3)), kit.BLOCK)
    together = decode(pipeline, model, requests, policy=policy, options=Options(batch=4)).answers
    alone = [decode(pipeline, model, [request], policy=policy).answers[request.id] for request in requests]
    assert list(together.values()) == alone


def test_the_draft_changes_the_next_selection_and_never_the_block_it_drafts(kit, model):
    """HERALD with and without the draft: block 0 and 1 alike where the selection before was alike, tokens of block 0
    never different."""
    requests = kit.prompts([120], 32)
    policy = scripted(((4,),), kit.BLOCK)
    runs = [
        decode(kit.describe(name, model.shape, budget=0.1), model, requests, policy=policy).answers[0]
        for name in ("herald", "herald-no-draft")
    ]
    assert runs[0][: kit.BLOCK] == runs[1][: kit.BLOCK]
    assert runs[0] != runs[1]


def test_exact_layers_may_attend_on_the_gpu(kit, model):
    """``exact_layers_on=gpu``: the pass runs them beside the host; at full budget the tokens are dense's."""
    requests, policy = kit.prompts([40, 21], 24), scripted(((1, 3), (5, 2)), kit.BLOCK)
    on_gpu = kit.describe("herald", model.shape, budget=1.0, exact_layers_on="gpu")
    dense = kit.describe("dense", model.shape)
    options = Options(batch=2, check=True)
    answers = [decode(p, model, requests, policy=policy, options=options).answers for p in (on_gpu, dense)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["herald", "herald-32q", "mage-cpu", "mage-cpu-representative"])
@pytest.mark.parametrize("keys", ["full", "key-only"])
def test_whoever_gathers_tokens_and_pools_are_the_same(kit, model, name, keys):
    requests, policy = kit.prompts([83, 40, 21, 5], 24), scripted(((1, 3), (5, 2, 1), (8,)), kit.BLOCK)
    runs = [
        decode(
            kit.describe(name, model.shape, budget=0.3, gather=gather, keys=keys),
            model,
            requests,
            policy=policy,
            options=Options(batch=3, check=True),
        )
        for gather in ("cpu", "fused", "gpu")
    ]
    assert runs[0].answers == runs[1].answers == runs[2].answers
    assert runs[0].checksums == runs[1].checksums == runs[2].checksums


def test_exact_layers_on_the_gpu_may_leave_one_layer_to_the_host(kit):
    """The pass then has no layer to finish."""
    small = tiny(block_length=kit.BLOCK, num_layers=3)
    requests, policy = kit.prompts([40], 24), scripted(((1, 3),), kit.BLOCK)
    pipelines = (
        kit.describe("herald", small.shape, budget=1.0, exact_layers_on="gpu"),
        kit.describe("dense", small.shape),
    )
    assert len({str(decode(p, small, requests, policy=policy).answers) for p in pipelines}) == 1


@pytest.mark.parametrize("exact", [0, 1, 3])
def test_any_number_of_exact_layers(kit, model, exact):
    ours, slow = compare(kit, model, "herald", kit.prompts([50], 24), ((3, 1, 2),), exact_layers=exact)
    assert ours == slow


def test_a_budget_of_nothing_leaves_the_newest_block(kit, model):
    ours, slow = compare(kit, model, "herald", kit.prompts([50], 24), ((3, 1, 2),), budget=0.0)
    assert ours == slow


def test_tokens_do_not_depend_on_the_number_of_kernel_threads(kit, model):
    requests, policy = kit.prompts([100, 60], 24), scripted(((3, 1), (2,)), kit.BLOCK)
    pipeline = kit.describe("herald", model.shape, budget=0.1)
    runs = [
        decode(pipeline, model, requests, policy=policy, options=Options(batch=2, threads=n, check=True))
        for n in (1, 2)
    ]
    assert runs[0].answers == runs[1].answers
    assert runs[0].checksums == runs[1].checksums


def test_moe_layers_run_in_every_part_of_a_step(kit):
    from herald_pipeline.model import MoeShape

    moe = MoeShape(
        8, 2, 32, num_shared_experts=1, num_groups=2, groups_per_token=1, first_dense_layers=1, gate="sigmoid"
    )
    model = tiny(block_length=kit.BLOCK, moe=moe, rotary_fraction=0.5)
    ours, slow = compare(kit, model, "herald", kit.prompts([50, 9], 24), ((3, 1, 2), (2,)))
    assert ours == slow


def test_the_selected_entries_are_the_slow_decoders(kit, model):
    """Not only the tokens: positions in the pool, layer by layer and head by head, at the end of the run."""
    pipeline = kit.describe("herald", model.shape, budget=0.1)
    request = kit.prompts([120], 24)[0]
    held = {}

    def look(launch):
        if launch.stage.name == "append":
            held[launch.block] = True

    policy = scripted(((3,),), kit.BLOCK)
    decode(pipeline, model, [request], policy=policy, options=Options(check=True, before_stage=look))
    assert list(held) == [0, 1, 2]
    assert torch.is_inference_mode_enabled() is False
