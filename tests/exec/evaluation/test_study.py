"""The study's rules: answers and steps are the executor's, token for token; options do what they say."""

from dataclasses import replace

import pytest
import torch

from herald_exec.evaluation.grid import run_cell
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.rules import RULES, Previous, Rule, When, get_rule
from herald_exec.evaluation.scoring import rounded_to_int8, select, spread
from herald_exec.evaluation.study import Study
from herald_exec.kernels import reference
from herald_exec.models import random_model, tiny_shape
from herald_exec.pools import KV
from herald_exec.reference import open_reference, read_shipped_material
from herald_exec.reference.tasks import draw_samples
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import Attention

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def material():
    return read_shipped_material()


@pytest.fixture(scope="module")
def samples(material):
    return list(draw_samples(material, "log", 256, 3, first_seed=70))


@pytest.fixture(scope="module")
def model():
    # No end token, so that random weights decode every block.
    return random_model(tiny_shape(vocab_size=4096, num_layers=4, eos_token_ids=(4095,)), seed=3)


@pytest.fixture(scope="module")
def prompts(model, samples):
    return Prompts(model, samples)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("dense", 1.0),
        ("mage-offload", 0.1),
        ("infinigen", 0.1),
        ("herald", 0.1),
        ("herald-32q", 0.1),
        ("herald-no-draft", 0.1),
    ],
)
def test_a_methods_rule_answers_as_the_executor_does(model, prompts, samples, material, name, budget):
    """Random weights, thresholds low enough for several tokens a step: any fault in sets, positions or KV shows."""
    found = Study(prompts, get_rule(name), budget, threshold=0.002).run()
    expected = run_cell(model, material, name, None if name == "dense" else budget, samples, threshold=0.002)
    said = [material.encoder.decode(answer) for answer in found.answers]
    assert said == [row["answer"] for row in expected["raw"]]
    blocks = [steps for row in found.steps for steps in row]
    assert sum(blocks) / len(blocks) == expected["steps_per_block"]
    assert len(blocks) / len(samples) == expected["blocks_per_answer"]


def test_the_shipped_model_answers_alike_in_both(material):
    model = open_reference().load("cpu", torch.float32)
    samples = list(draw_samples(material, "log", 256, 2, first_seed=90))
    found = Study(Prompts(model, samples), get_rule("herald"), 0.2).run()
    expected = run_cell(model, material, "herald", 0.2, samples)
    assert [material.encoder.decode(answer) for answer in found.answers] == [row["answer"] for row in expected["raw"]]


@pytest.mark.parametrize("name", sorted(set(RULES) - {"herald-key-only", "herald-int8"}))
def test_at_full_budget_every_rule_answers_as_dense_does(prompts, name):
    dense = Study(prompts, get_rule("dense"), 1.0, threshold=0.002).run()
    found = Study(prompts, get_rule(name), 1.0, threshold=0.002).run()
    if name == "herald-no-draft":
        # What it leaves out of selection is read all the same.
        assert found.answers == dense.answers
    assert (found.answers, found.steps) == (dense.answers, dense.steps)


def kv(length, seed, heads=2, dim=8):
    generator = torch.Generator().manual_seed(seed)
    return KV(*(torch.randn(1, heads, length, dim, generator=generator) for _ in "kv"))


class OneStore:
    """A store of one layer and slot, as the kernels' definition reads it."""

    def __init__(self, stored, dtype="fp32"):
        self.stored, self.dtype, self.num_kv_heads = stored, dtype, stored.keys.shape[1]

    def read(self, _layer, _slot, first, count):
        return tuple(part[0, :, first : first + count].transpose(0, 1).contiguous().numpy() for part in self.stored)


@pytest.mark.parametrize("options", [{}, {"smoothing": 5}, {"key_only": True}])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_pass_is_the_kernels_definition_of_selection(options, queries):
    """float64 numpy, written for the kernels: same entries, same output."""
    from herald_exec.kernels import Draft, SelectOptions

    prefix, extra, own = kv(40, 1), kv(6, 2), kv(queries, 3)
    q = torch.randn(1, queries, 4, 8, generator=torch.Generator().manual_seed(4))
    found = select(q, prefix, extra, own, Rule("mine", When.AHEAD, queries, **options), 7)
    alone = queries == 1
    behind = extra if alone else KV(*(torch.cat(pair, dim=2) for pair in zip(extra, own, strict=True)))
    expected = reference.select(
        OneStore(prefix),
        0,
        [0],
        [40],
        q,
        7,
        draft=Draft(OneStore(behind), [0], [behind.keys.shape[2]]),
        extra_kv=tuple(part.transpose(1, 2).contiguous().numpy() for part in own) if alone else None,
        options=SelectOptions(**options),
    )
    assert found.picked[0].tolist() == expected.indices[0].tolist()
    torch.testing.assert_close(found.output.double(), torch.from_numpy(expected.output), rtol=1e-5, atol=1e-5)


def test_pooling_takes_the_largest_neighbour():
    values = torch.tensor([[[0.0, 0.0, 5.0, 0.0, 1.0, 0.0, 0.0]]])
    rule = Rule("mine", When.AHEAD, 1, pooling=3)
    assert spread(values, rule).tolist() == [[[0.0, 5.0, 5.0, 5.0, 1.0, 1.0, 0.0]]]


def test_8_bit_keys_are_within_half_a_step_of_the_rows_scale():
    keys = kv(50, 9).keys
    step = keys.abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((rounded_to_int8(keys) - keys).abs() <= step / 2 + 1e-6).all())


def test_8_bit_keys_pick_the_exact_entries_where_candidates_hold_them():
    """Twice as many candidates as entries, scored again exactly: with well separated scores nothing is lost."""
    prefix, own = kv(64, 5), kv(1, 6)
    q = 4 * torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(7))
    exact = select(q, prefix, None, own, Rule("mine", When.AHEAD, 1, key_only=True), 6)
    rounded = select(q, prefix, None, own, Rule("mine", When.AHEAD, 1, int8_keys=True), 6)
    assert rounded.picked.tolist() == exact.picked.tolist()
    torch.testing.assert_close(rounded.output, exact.output)


def test_key_only_reads_about_half_and_8_bit_keys_about_a_third(model):
    shape = open_reference().shape
    full, keys, small = (
        get_rule(name).scan_bytes(shape, 4096, 204) for name in ("herald", "herald-key-only", "herald-int8")
    )
    ahead = replace(get_rule("herald"), exact_layers=0)
    assert ahead.scan_bytes(shape, 4096, 204) == shape.num_layers * (4096 + 32) * 2 * 2 * 64 * 2
    assert small < keys < full
    assert replace(get_rule("herald-key-only"), exact_layers=0).scan_bytes(shape, 4096, 204) < 0.53 * ahead.scan_bytes(
        shape, 4096, 204
    )
    assert get_rule("recency").scan_bytes(shape, 4096, 204) == 0


def test_the_random_control_depends_on_its_seed(prompts):
    first, again, other = (
        Study(prompts, get_rule("random"), 0.05, threshold=0.002, seed=seed).run() for seed in (1, 1, 2)
    )
    assert first == again
    assert first.answers != other.answers


def test_bytes_count_selections_and_not_the_last_block(prompts, samples):
    """Three blocks an answer, two selections on the way; MAGE selects for every block."""
    herald = Study(prompts, get_rule("herald"), 0.1, threshold=0.002).run()
    mage = Study(prompts, get_rule("mage-offload"), 0.1, threshold=0.002).run()
    shape = prompts.model.shape
    rule = get_rule("herald")
    expected = sum(rule.scan_bytes(shape, length, int(0.1 * length)) for length in (256, 256 + shape.block_length))
    assert [len(row) for row in herald.steps] == [3] * len(samples)
    assert herald.scan_bytes == pytest.approx([expected] * len(samples))
    assert mage.scan_bytes[0] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [({"smoothing": 4}, "even"), ({"queries": 0}, "queries"), ({"exact_layers": -1}, "exact_layers")],
)
def test_an_impossible_rule_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        replace(Rule("mine", When.AHEAD, previous=Previous.DRAFT), **change)


def test_an_unknown_rule_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match="herald-int8"):
        get_rule("herald-int")


def test_a_study_needs_one_task_and_one_context_of_a_block_causal_model(model, samples):
    with pytest.raises(ConfigError, match="one context"):
        Prompts(model, [samples[0], replace(samples[1], context=512)])
    with pytest.raises(ConfigError, match="bidirectional"):
        Prompts(random_model(tiny_shape(attention=Attention.BIDIRECTIONAL)), samples)
