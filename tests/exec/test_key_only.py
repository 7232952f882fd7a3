"""Selection by keys alone: the same tokens where everything is selected, half the bytes where little is."""

import pytest

from herald_exec import Options, decode
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.steps import ListedSteps


@pytest.fixture(scope="module")
def model():
    return tiny(block_length=8)


def run(kit, model, budget, **options):
    pipeline = kit.describe("herald", model.shape, budget=budget)
    policy = PlannedPolicy(ListedSteps(((2, 1),), 8), Sampler(mask_token_id=1))
    return decode(pipeline, model, kit.prompts([200], 24), policy=policy, options=Options(keep_trace=True, **options))


def test_a_budget_of_all_gives_the_tokens_of_the_whole_scan(kit, model):
    assert run(kit, model, 1.0, key_only=True).answers == run(kit, model, 1.0).answers


def test_only_layers_that_select_are_read_by_keys_alone(kit, model):
    whole, keys = (
        [(s.layer, s.bytes) for s in run(kit, model, 0.1, key_only=only).trace.spans if s.stage == "select"]
        for only in (False, True)
    )
    for (layer, all_bytes), (_, key_bytes) in zip(sorted(whole), sorted(keys), strict=True):
        if layer < 2:
            assert key_bytes == all_bytes
        else:
            assert 0.5 < key_bytes / all_bytes < 0.6
