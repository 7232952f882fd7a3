"""The same questions by several methods, on a model that has learned nothing: counts and fields, not accuracy."""

import json

import pytest

from herald_exec.checkpoints.tokenizer import load_tokenizer
from herald_exec.models import random_model
from herald_exec.reference import open_reference, read_shipped_material
from herald_exec.reference.answers import ask, question
from herald_pipeline import catalogue


@pytest.fixture(scope="module")
def found():
    from dataclasses import replace

    checkpoint = open_reference()
    shape = replace(catalogue.get("herald-ref"), num_layers=3)
    model = random_model(shape, 0)
    material = read_shipped_material()
    tokenizer = load_tokenizer(checkpoint.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("herald_exec.reference.answers.MAX_TOKENS", 32)
        return ask(model, tokenizer, material, ("dense", "herald"), ("kv", "code"), 256, 3)


def test_questions_go_round_the_tasks_and_every_method_answers_each(found):
    assert [row["task"] for row in found["rows"]] == ["kv", "code", "kv"]
    assert len({row["question"] for row in found["rows"]}) == 3
    assert all(set(row["answers"]) == {"dense", "herald"} for row in found["rows"])


def test_totals_are_those_of_the_rows(found):
    for method, total in found["methods"].items():
        assert total["right"] == sum(row["answers"][method]["right"] for row in found["rows"])
        assert total["of"] == 3
        assert total["accuracy"]["low"] <= total["right"] / 3 <= total["accuracy"]["high"]


def test_the_document_is_json(found):
    json.dumps(found, allow_nan=False)


def test_of_a_prompt_the_last_question_is_shown():
    text = "a story\nQuestion: old?\nAnswer: x\nmore\nQuestion: Which code has y?\nAnswer:"
    assert question(text) == "Which code has y?"
