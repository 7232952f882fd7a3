"""The fused actions give the tokens of the plain ones: launch by launch, in Triton's interpreter."""

import threading

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with the CUDA builds of PyTorch")

from herald_exec import Options, decode, execution
from herald_exec.cuda.actions import DeviceActions
from herald_exec.cuda.streams import Foreseen
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy, RulePolicy
from herald_exec.streams import ThreadStreams
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.model import MoeShape
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import ListedSteps

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: test_on_device runs the kernels on it"),
]
BLOCK = 4
ONE_AT_A_TIME = threading.Lock()
SHAPE = {"block_length": BLOCK, "num_layers": 3}


class Reading(ThreadStreams):
    """Streams of threads that read a launch's outcome late, as those of a GPU do."""

    def _on_stream(self, name):
        return torch.inference_mode()

    def _carry_out(self, item):
        # Triton's interpreter keeps its place in globals.
        with ONE_AT_A_TIME:
            super()._carry_out(item)

    def wait(self, completion):
        value = super().wait(completion)
        if callable(value):
            value = completion.value = value()
        return value.value if isinstance(value, Foreseen) else value


@pytest.fixture
def fused(monkeypatch):
    """Make runs on the CPU take the fused actions."""

    def device(pipeline, session, options):
        return Reading([s.name for s in pipeline.template.streams]), DeviceActions(session, graphs=False).table()

    def patch():
        monkeypatch.setattr(execution, "_device", device)

    return patch


def planned(rows, order="confidence"):
    return PlannedPolicy(ListedSteps(rows, BLOCK), Sampler(mask_token_id=1), order=order)


def both(kit, fused, name, model, requests, accepts, **options):
    pipeline = kit.describe(name, model.shape, budget=0.3)
    plain = decode(pipeline, model, requests, policy=accepts, options=Options(**options))
    fused()
    return plain, decode(pipeline, model, requests, policy=accepts, options=Options(**options))


FUSED = ["herald", "dense", "mage-cpu", "layer-prefetch", "mage-offload", "infinigen"]


@pytest.mark.parametrize("name", FUSED)
def test_fused_runs_give_the_plain_tokens_and_commits(name, kit, fused):
    """Rows that draft, denoise and complete in one forward; a block that is complete after its first step."""
    requests = kit.prompts([18, 9], 12)
    plain, found = both(kit, fused, name, tiny(**SHAPE), requests, planned(((1, 4, 2), (3, 1, 2))), batch=2)
    assert found.answers == plain.answers
    assert found.commits == plain.commits


def test_rows_that_go_on_by_themselves_give_the_plain_tokens(kit, fused):
    requests = kit.prompts([18, 9, 25], [12, 4, 8])
    policy = planned(((1, 4, 2), (3,), (2, 1)), order="scripted")
    options = {"batch": 2, "policy": BatchPolicy.FIRST_DONE_FIRST_OUT}
    plain, found = both(kit, fused, "herald", tiny(**SHAPE), requests, policy, **options)
    assert found.answers == plain.answers
    assert found.commits == plain.commits


@pytest.mark.parametrize(
    ("name", "gather"),
    [
        ("herald", "cpu"),
        ("herald", "gpu"),
        ("mage-cpu", "cpu"),
        ("mage-cpu", "gpu"),
        ("mage-cpu-representative", "cpu"),
    ],
)
def test_halves_that_take_turns_give_the_tokens_of_the_whole_batch(name, gather, kit, fused):
    """Three rows: the first half has a row more, and both are fewer than there are slots."""
    model, requests = tiny(**SHAPE), kit.prompts([18, 70, 9], [12, 4, 8])
    pipeline = kit.describe(name, model.shape, budget=0.3, gather=gather)
    policy = planned(((1, 4, 2), (3,), (2, 1)))
    plain = decode(pipeline, model, requests, policy=policy, options=Options(batch=3))
    fused()
    options = Options(batch=3, policy=BatchPolicy.TWO_BATCH_OVERLAP)
    found = decode(pipeline, model, requests, policy=policy, options=options)
    assert found.answers == plain.answers
    assert found.commits == plain.commits


def test_a_threshold_decides_alike(kit, fused):
    policy = RulePolicy(acceptance.get("confidence", threshold=0.02), Sampler(mask_token_id=1))
    plain, found = both(kit, fused, "herald", tiny(**SHAPE), kit.prompts([18, 9], 12), policy, batch=2)
    assert found.commits == plain.commits
    assert {len(block) for block in plain.commits[0]} == {1, 3}
    assert found.answers == plain.answers


def test_experts_and_partly_rotated_heads_give_the_plain_tokens(kit, fused):
    moe = MoeShape(
        8, 2, 32, num_shared_experts=1, num_groups=2, groups_per_token=1, first_dense_layers=1, gate="sigmoid"
    )
    model = tiny(moe=moe, rotary_fraction=0.5, **SHAPE)
    plain, found = both(kit, fused, "herald", model, kit.prompts([18], 8), planned(((3, 1),)), batch=1)
    assert found.answers == plain.answers


def test_exact_layers_on_the_device_give_the_plain_tokens(kit, fused):
    """``exact_layers_on=gpu``: a layer of the pass in one piece, over each row's own length."""
    model, requests = tiny(block_length=BLOCK, num_layers=4), kit.prompts([18, 9], 8)
    pipeline = kit.describe("herald", model.shape, budget=0.3, exact_layers_on="gpu")
    plain = decode(pipeline, model, requests, policy=planned(((2,),)), options=Options(batch=2))
    fused()
    found = decode(pipeline, model, requests, policy=planned(((2,),)), options=Options(batch=2))
    assert found.answers == plain.answers


@pytest.mark.parametrize("gather", ["fused", "gpu"])
@pytest.mark.parametrize("name", ["herald", "mage-cpu"])
def test_whoever_gathers_the_tokens_are_those_of_the_plain_actions(name, gather, kit, fused):
    """Also with requests of different lengths, and more requests than slots."""
    model, requests = tiny(**SHAPE), kit.prompts([70, 9, 40], 12)
    pipelines = [kit.describe(name, model.shape, budget=0.3, gather=how) for how in ("cpu", gather)]
    policy, options = planned(((1, 4, 2), (3, 1, 2))), Options(batch=2)
    plain = decode(pipelines[0], model, requests, policy=policy, options=options)
    fused()
    assert decode(pipelines[1], model, requests, policy=policy, options=options).answers == plain.answers


@pytest.mark.parametrize("gather", ["cpu", "gpu"])
def test_steps_that_fetch_anew_give_the_plain_tokens(gather, kit, fused):
    """Every layer of every step picks and fetches. A small model: the interpreter takes seconds a step."""
    size = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_layers": 2, "eos_token_ids": ()}
    model, requests = tiny(block_length=BLOCK, **size), kit.prompts([18, 9], 6, vocab=64)
    pipeline = kit.describe("step-fetch", model.shape, budget=0.3, gather=gather)
    policy, options = planned(((2, 2),)), Options(batch=2)
    plain = decode(pipeline, model, requests, policy=policy, options=options)
    fused()
    found = decode(pipeline, model, requests, policy=policy, options=options)
    assert found.answers == plain.answers
    assert found.commits == plain.commits


@pytest.mark.parametrize("name", ["herald", "ideal"])
def test_synthetic_prompts_fill_every_pool_that_a_step_reads(name, kit, fused):
    pipeline = kit.describe(name, tiny(**SHAPE).shape, budget=0.3)
    fused()
    held = {}

    class Looking(DeviceActions):
        def denoise(self, session, task):
            if not held:
                row = task.rows[0]
                sparse = session.pools.stores["sparse"]
                for layer in range(session.num_layers):
                    if sparse.holds(layer):
                        at = sparse.row(row.slot, row.parity if sparse.buffers == 2 else 0)
                        held[layer] = sparse.layer(layer).keys[at, :, : row.selected]
                    else:
                        held[layer] = session.pools.stores["exact"].layer(layer).keys[row.slot, :, : row.prefix]
                held[layer] = held[layer].clone()
            return super().denoise(session, task)

    def device(pipeline, session, options):
        return Reading([s.name for s in pipeline.template.streams]), Looking(session, graphs=False).table()

    execution._device = device
    run = decode(
        pipeline, tiny(**SHAPE), kit.prompts([40], 8), policy=planned(((2,),)), options=Options(synthetic_kv=True)
    )
    assert len(run.answers[0]) == 8
    assert all(part.float().std() > 0.5 for part in held.values())
