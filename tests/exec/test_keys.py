"""What selection reads of the keys: the same tokens where everything is selected, fewer bytes where little is."""

import pytest

from herald_exec import Options, decode
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_pipeline.capacity import request_size
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError
from herald_pipeline.steps import ListedSteps

NARROWER = ("key-only", "int8")


@pytest.fixture(scope="module")
def model():
    return tiny(block_length=8)


def run(kit, model, budget, keys, method="herald"):
    pipeline = kit.describe(method, model.shape, budget=budget, keys=keys)
    policy = PlannedPolicy(ListedSteps(((2, 1),), 8), Sampler(mask_token_id=1))
    return decode(pipeline, model, kit.prompts([200], 24), policy=policy, options=Options(keep_trace=True))


@pytest.mark.parametrize("keys", NARROWER)
def test_a_budget_of_all_gives_the_tokens_of_the_whole_scan(kit, model, keys):
    assert run(kit, model, 1.0, keys).answers == run(kit, model, 1.0, "full").answers


@pytest.mark.parametrize(("keys", "least", "most"), [("key-only", 0.5, 0.6), ("int8", 0.2, 0.55)])
def test_only_layers_that_select_are_read_in_part(kit, model, keys, least, most):
    whole, part = (
        sorted((s.layer, s.bytes) for s in run(kit, model, 0.1, how).trace.spans if s.stage == "select")
        for how in ("full", keys)
    )
    for (layer, all_bytes), (_, key_bytes) in zip(whole, part, strict=True):
        if layer < 2:
            assert key_bytes == all_bytes
        else:
            assert least < key_bytes / all_bytes < most


@pytest.mark.parametrize("keys", NARROWER)
def test_launches_read_the_bytes_that_the_description_states(kit, model, keys):
    done = run(kit, model, 0.1, keys)
    pipeline = kit.describe("herald", model.shape, budget=0.1, keys=keys)
    described = described_bytes(pipeline, 200)
    measured = {s.layer: s.bytes for s in done.trace.spans if s.stage == "select" and s.block == 0}
    assert measured
    assert {layer: described[layer] for layer in measured} == pytest.approx(measured)


def described_bytes(pipeline, context):
    """Bytes of each layer's selection, counted by hand from shapes."""
    model, settings = pipeline.model, pipeline.settings
    row, entry = model.num_kv_heads * model.head_dim * 4, 2 * model.num_kv_heads * model.head_dim * 4
    selected, draft = int(settings.budget * context), settings.block_length * entry
    part = (context + selected) * row + draft
    if settings.keys == "int8":
        padded = -(-model.head_dim // 32) * 32
        # Up to rank 1.1 k, less the first k / 1.1 but for their heaviest eighth.
        again = 1.1 * selected - 7 / 8 * selected / 1.1
        part = context * model.num_kv_heads * (padded + 4) + (again + selected) * row + draft
    whole = context * entry + draft
    return {layer: whole if layer < settings.exact_layers else part for layer in range(model.num_layers)}


def test_8_bit_keys_are_counted_in_host_memory_and_key_only_takes_none(kit, model):
    size = {
        keys: sum(
            pool.bytes_per_request(request_size(kit.describe("herald", model.shape, keys=keys), 200))
            for pool in kit.describe("herald", model.shape, keys=keys).pools
        )
        for keys in ("full", *NARROWER)
    }
    assert size["key-only"] == size["full"] < size["int8"]


def test_a_method_that_selects_nothing_on_the_cpu_refuses_them(kit, model):
    with pytest.raises(ConfigError, match="selects nothing there"):
        kit.describe("dense", model.shape, keys="int8")


def test_a_misspelled_way_names_the_closest(kit, model):
    with pytest.raises(ConfigError, match="did you mean 'key-only'"):
        kit.describe("herald", model.shape, keys="keyonly")


@pytest.mark.parametrize("keys", NARROWER)
@pytest.mark.parametrize("method", ["mage-cpu", "mage-cpu-representative", "herald-no-draft"])
def test_every_method_that_selects_on_the_cpu_takes_them(kit, model, method, keys):
    assert run(kit, model, 1.0, keys, method).answers == run(kit, model, 1.0, "full", method).answers
