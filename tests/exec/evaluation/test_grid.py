"""The accuracy grid: cells by the executor, counted rightly, with what must agree agreeing."""

from dataclasses import replace

import pytest
import torch

from herald_exec.evaluation.grid import PLAN, REDUCED, check_plan, run_cell, run_grid
from herald_exec.models import random_model, tiny_shape
from herald_exec.reference import open_reference, read_shipped_material
from herald_exec.reference.decode import decode
from herald_exec.reference.scoring import score_sample
from herald_exec.reference.tasks import TASKS, draw_samples
from herald_pipeline import methods
from herald_pipeline.errors import ConfigError


@pytest.fixture(scope="module")
def material():
    return read_shipped_material()


@pytest.fixture(scope="module")
def tiny_model():
    return random_model(tiny_shape(vocab_size=4096), seed=3)


def test_at_full_budget_herald_answers_as_dense_does(tiny_model, material):
    samples = list(draw_samples(material, "log", 256, 2))
    dense = run_cell(tiny_model, material, "dense", None, samples, threshold=0.01)
    herald = run_cell(tiny_model, material, "herald", 1.0, samples, threshold=0.01)
    assert herald["raw"] == dense["raw"]
    assert herald["steps_per_block"] == dense["steps_per_block"]


@pytest.mark.timeout(300)
def test_dense_in_the_executor_is_the_decoder_beside_training(material):
    model = open_reference().load("cpu", torch.float32)
    samples = list(draw_samples(material, "rec", 256, 2, first_seed=40))
    found = run_cell(model, material, "dense", None, samples)
    beside = decode(model, samples)
    texts = [material.encoder.decode(answer) for answer in beside.answers]
    assert [row["answer"] for row in found["raw"]] == texts
    assert found["steps_per_block"] == sum(map(sum, beside.steps)) / sum(map(len, beside.steps))
    scores = [score_sample(sample, text).exact for sample, text in zip(samples, texts, strict=True)]
    assert found["exact"]["value"] == sum(scores) / 2


def test_every_cell_of_a_plan_comes_out_on_the_same_samples(tiny_model, material):
    plan = replace(REDUCED, tasks=("kv",), contexts=(256,), samples=1, threshold=0.01)
    rows = list(run_grid(tiny_model, material, plan))
    assert [(row["method"], row["budget"]) for row in rows] == [
        ("dense", 1.0),
        ("mage-offload", 0.05),
        ("herald", 0.05),
    ]
    assert {row["raw"][0]["seed"] for row in rows} == {plan.first_seed}


def test_the_plans_name_methods_and_tasks_that_exist_and_200_samples():
    assert PLAN.samples >= 200
    for plan in (PLAN, REDUCED):
        check_plan(plan)
        assert {name for name, _ in plan.methods} <= set(methods.names())
        assert set(plan.tasks) <= set(TASKS)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 0}, "samples"),
        ({"tasks": ("kw",)}, "did you mean"),
        ({"methods": (("herald", (1.5,)),)}, "budget"),
        ({"threshold": float("nan")}, "threshold"),
    ],
)
def test_an_impossible_plan_is_refused_before_anything_runs(change, words):
    with pytest.raises(ConfigError, match=words):
        check_plan(replace(REDUCED, **change))
