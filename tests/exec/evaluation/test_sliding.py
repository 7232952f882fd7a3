"""Sliding windows on a block-causal model: one block is the plain decoder, wider ones follow a naive reference."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from herald_exec.attention import block_causal_mask
from herald_exec.evaluation.__main__ import app
from herald_exec.evaluation.sliding import REDUCED, Plan, decode_sliding, run_plan
from herald_exec.models import random_model
from herald_exec.reference import read_shipped_material
from herald_exec.reference.decode import decode
from herald_exec.reference.tasks import Sample
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError

B = 32
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 4096,
    "mask_token_id": 1,
    "eos_token_ids": (0,),
    "max_positions": 512,
}


@pytest.fixture(scope="module")
def model():
    model = random_model(replace(catalogue.get("tiny"), **SMALL), seed=5)
    # Sharp enough that a threshold of .5 divides the positions.
    model.weights.head.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, 4096, (3, 64), generator=generator).tolist()
    return [Sample("log", 64, number, tuple(prompt), (), ("x",)) for number, prompt in enumerate(prompts)]


def test_a_window_of_one_block_is_the_plain_decoder(model, samples):
    one, plain = decode_sliding(model, samples, 1, 0.5), decode(model, samples, 0.5)
    assert one == plain
    assert any(steps not in (1, B) for row in one.steps for steps in row)


def logits_of(model, prompt, answer, end):
    """Logits ``[end, V]`` of the answer's first ``end`` positions from one forward of everything, nothing cached."""
    line = [*prompt, *(1 if token is None else token for token in answer[:end])]
    tokens = torch.tensor(line)
    place = torch.arange(len(line))
    mask = block_causal_mask(place, place, B)
    hidden = model.embed(tokens)
    rotary = model.rotary(place)
    for layer in range(model.shape.num_layers):
        q, k, v = model.project(layer, hidden, rotary)
        groups = q.shape[1] // k.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        hidden = model.finish(layer, hidden, (weights @ values).transpose(0, 1).flatten(1))
    return model.logits(hidden).float()[len(prompt) :]


def reference(model, prompt, blocks, window, threshold):
    """One row, everything computed anew each round from the whole sequence with the block-causal mask."""
    tokens: list[int | None] = [None] * ((blocks + window - 1) * B)
    steps = []
    for start in range(0, blocks * B, B):
        span, count, done = range(start, start + window * B), 0, False
        while not done:
            done = all(tokens[i] is not None for i in range(start, start + B))
            probability = logits_of(model, prompt, tokens, span.stop).softmax(-1)
            probability[:, 1] = 0.0
            sure, token = (part.tolist() for part in probability[span.start :].max(-1))
            open_ = [i for i in span if tokens[i] is None]
            best = max(open_, key=lambda i: sure[i - start]) if open_ and not done else None
            for i in open_:
                if sure[i - start] >= threshold or i == best:
                    tokens[i] = token[i - start]
            count += not done
        steps.append(count)
    return tokens[: blocks * B], steps


@pytest.mark.parametrize("window", [1, 2, 3])
def test_windows_decode_as_a_reference_without_a_cache_does(model, samples, window):
    found = decode_sliding(model, samples, window, 0.5)
    for row, sample in enumerate(samples):
        tokens, steps = reference(model, sample.prompt, 3, window, 0.5)
        end = tokens.index(0) if 0 in tokens else len(tokens)
        assert found.answers[row] == tokens[:end]
        assert found.steps[row] == steps[: len(found.steps[row])]


def test_wider_windows_do_commit_ahead(model, samples):
    # Otherwise they would be fixed blocks at a higher price.
    steps = decode_sliding(model, samples, 2, 0.5).steps
    assert any(0 in row[1:] for row in steps)
    assert all(row[0] > 0 for row in steps)


@pytest.mark.parametrize("window", [1, 2])
def test_a_batch_equals_its_rows_alone(model, samples, window):
    together = decode_sliding(model, samples, window, 0.5)
    alone = [decode_sliding(model, [sample], window, 0.5) for sample in samples]
    assert together.answers == [one.answers[0] for one in alone]
    assert together.steps == [one.steps[0] for one in alone]


def test_cells_hold_intervals_and_raw_answers(model):
    plan = Plan(windows=(1, 2), tasks=("log",), contexts=(256,), samples=2, threshold=0.5)
    rows = list(run_plan(model, read_shipped_material(), plan, batch=2))
    assert [row["window_blocks"] for row in rows] == [1, 2]
    assert [raw["seed"] for raw in rows[0]["raw"]] == [40_000, 40_001]
    assert rows[1]["positions"]["value"] == 64 * rows[1]["forwards"]["value"]
    steps = rows[0]["raw"][0]["steps"]
    assert rows[0]["forwards"]["value"] == pytest.approx(
        sum(sum(raw["steps"]) + len(raw["steps"]) for raw in rows[0]["raw"]) / 2
    )
    assert all(1 <= count <= B for count in steps)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--window", "0"), "window must be >= 1"),
        (("--window", "9"), "window must be <= 8"),
        (("--task", "lgo"), "unknown task 'lgo'; did you mean 'log'"),
        (("--samples", "0"), "samples must be >= 1"),
        (("--model", "herald-ref-bidirectional"), "unknown reference model 'herald-ref-bidirectional'"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(args, message):
    result = CliRunner().invoke(app, ["sliding", "--reduced", *args])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_the_plans_tasks_have_answers_of_several_blocks():
    from herald_exec.reference.tasks import MAX_ANSWER_TOKENS

    assert all(MAX_ANSWER_TOKENS[task] > B for task in REDUCED.tasks)
