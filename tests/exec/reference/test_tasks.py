"""Samples: reproducible, of exact length, answerable from their own haystack."""

import itertools
from random import Random

import pytest

from herald_exec.reference import read_shipped_material
from herald_exec.reference.scoring import score_sample
from herald_exec.reference.tasks import MAX_ANSWER_TOKENS, TASKS, draw_item, draw_sample, draw_samples
from herald_exec.reference.vocabulary import EOS, MASK, PAD
from herald_pipeline.errors import ConfigError


def draw_question(material, task, seed):
    world = material.world(Random(seed))
    items = [draw_item(world, name) for name in ("kv", "kv", "kv")]
    if task == "arith":
        return world.ask_arithmetic()
    return world.ask_multi() if task == "multi" else [*items, draw_item(world, task)][-1].ask()


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_exactly_the_tokens_of_its_context(material, task):
    for sample in draw_samples(material, task, 512, 8):
        assert len(sample.prompt) == 512
        assert not {EOS, MASK, PAD} & set(sample.prompt)


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_one_and_another_samples_answer_does_not(material, task):
    samples = list(draw_samples(material, task, 512, 12))
    for sample, other in itertools.pairwise(samples):
        assert score_sample(sample, material.encoder.decode(sample.answer)) == (1, 1)
        assert score_sample(sample, material.encoder.decode(other.answer)).exact == 0


@pytest.mark.parametrize("task", [task for task in TASKS if task != "arith"])
def test_the_haystack_states_what_is_asked(material, task):
    """Every value, name and word of the passage is in the prompt; only arithmetic has to be worked out."""
    for sample in draw_samples(material, task, 512, 12):
        prompt = " ".join(material.encoder.decode(sample.prompt).split())
        for field in sample.fields:
            stated = field.split(": ")[-1].strip('"') if task == "log" else " ".join(field.split())
            assert stated in prompt


def test_arithmetic_is_right(material):
    for sample in draw_samples(material, "arith", 256, 20):
        for step in sample.fields:
            left, _, right = step.partition(" = ")
            first, operation, second = left.split()
            found = {"+": int(first) + int(second), "-": int(first) - int(second), "*": int(first) * int(second)}
            assert found[operation] == int(right)


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_with_its_end_token_fits_the_tasks_blocks(task):
    shipped = read_shipped_material()
    assert max(len(sample.answer) for sample in draw_samples(shipped, task, 512, 60)) < MAX_ANSWER_TOKENS[task]


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(material):
    assert draw_sample(material, "hop", 512, 3) == draw_sample(material, "hop", 512, 3)
    assert draw_sample(material, "hop", 512, 3).prompt != draw_sample(material, "hop", 512, 4).prompt


@pytest.mark.parametrize("task", TASKS)
def test_the_tokens_marked_as_needed_are_those_of_the_fields(material, task):
    for sample in draw_samples(material, task, 512, 6):
        question = draw_question(material, task, sample.seed)
        said = [token for token, needed in zip(question.answer, question.needed, strict=True) if needed]
        assert len(question.needed) == len(question.answer)
        text = "".join(material.encoder.decode(said).split())
        wanted = ["".join(field.split()) for field in question.fields]
        assert all(field in text for field in wanted)
        # Punctuation that a piece shares with a field comes with it; nothing else does.
        assert len(text) <= len("".join(wanted)) + 2 * len(wanted)


def test_a_value_is_five_different_digits_and_begins_with_none_that_vanishes(material):
    world = material.world(Random(0))
    values = [world.value() for _ in range(500)]
    assert all(len(set(value)) == 5 and value.isdigit() and int(value) >= 10_000 for value in values)


def test_several_values_are_asked_of_facts_that_the_haystack_holds(material):
    for sample in draw_samples(material, "multi", 256, 20):
        prompt = material.encoder.decode(sample.prompt)
        assert 2 <= len(sample.fields) <= 4
        assert all(value in prompt for value in sample.fields)


@pytest.mark.parametrize(
    ("task", "context", "seed", "words"),
    [
        ("kw", 512, 0, "did you mean"),
        ("kv", 500, 0, "context: 500 is no multiple of the block length 32; use 480"),
        ("kv", 128, 0, "context"),
        ("kv", 512, -1, "seed"),
    ],
)
def test_what_cannot_be_drawn_is_refused(material, task, context, seed, words):
    with pytest.raises(ConfigError, match=words):
        draw_sample(material, task, context, seed)
