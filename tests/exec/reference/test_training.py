"""The training run: resumed as if never stopped, batches from their step alone, and a schedule as written down."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.reference import recipe as recipes
from herald_exec.reference.feed import Feed, make_batch
from herald_exec.reference.filler import read_filler
from herald_exec.reference.optimiser import orthogonal
from herald_exec.reference.prepare import HELD_OUT_FILE, TRAIN_FILE
from herald_exec.reference.recipe import BatchPlan, check_material
from herald_exec.reference.tasks import read_material
from herald_exec.reference.train import TrainOptions, train
from herald_exec.reference.vocabulary import write_tokenizer
from herald_pipeline.errors import ConfigError, RunError

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def data(material, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder, material.encoder.tokenizer, 512)
    (folder / "words.txt").write_text("\n".join([*material.single, *material.double]))
    material.filler.write(folder / TRAIN_FILE)
    material.filler.write(folder / HELD_OUT_FILE)
    return folder


@pytest.fixture
def recipe(material):
    tiny = recipes.get("tiny", steps=4)
    size = material.encoder.tokenizer.get_vocab_size()
    return replace(tiny, shape=replace(tiny.shape, vocab_size=size), evaluation_contexts=(256,))


def run(recipe, data, out, **changes):
    options = TrainOptions(data, out, out.with_suffix(".pt"), workers=0, evaluate_s=0.0)
    return train(recipe, replace(options, **changes))


def stored(folder):
    return dict(open_checkpoint(folder).load("cpu", torch.float32).weights.tensors())


def test_a_run_that_was_stopped_and_resumed_gives_the_weights_of_one_that_was_not(recipe, data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(recipe, data, whole)

    class StopError(Exception):
        pass

    original = Feed.next
    taken = []

    def stopping(self):
        if len(taken) == 3:
            raise StopError
        taken.append(1)
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "next", stopping)
        with pytest.raises(StopError):
            run(recipe, data, parts)
    assert torch.load(parts.with_suffix(".pt"), weights_only=True)["step"] < 4
    record = run(recipe, data, parts, resume=True)
    assert record["steps"] == 4
    for name, tensor in stored(whole).items():
        assert torch.equal(tensor, stored(parts)[name]), name


def test_the_result_is_a_checkpoint_with_tokenizer_curve_and_record(recipe, data, tmp_path):
    out = tmp_path / "out"
    run(recipe, data, out, evaluate_s=0.001, evaluate_samples=1)
    assert open_checkpoint(out).shape.num_params == recipe.shape.num_params
    record = json.loads((out / "training.json").read_text())
    plans = [recipe.plan(step, step / 4) for step in range(4)]
    assert record["clean_tokens"]["block"] == sum(plan.tokens for plan in plans if plan.kind == "block")
    curve = list(csv.DictReader((out / "loss.csv").read_text().splitlines()))
    assert [int(row["step"]) for row in curve] == [0, 1]
    # An untrained model guesses among all tokens.
    assert float(curve[0]["loss"]) == pytest.approx(np.log(recipe.shape.vocab_size), rel=0.05)
    assert read_material(out, out / HELD_OUT_FILE).encoder("amber") == read_material(data, data / TRAIN_FILE).encoder(
        "amber"
    )


def test_a_batch_is_the_same_from_a_worker_and_from_this_process(data):
    plans = [BatchPlan("block", 256, 2), BatchPlan("list", 512, 1)]
    feed = Feed(data, data / TRAIN_FILE, 7, lambda step: plans[step % 2], first=3, workers=1)
    material = read_material(data, data / TRAIN_FILE)
    try:
        for step in (3, 4):
            found, expected = feed.next(), make_batch(material, 7, step, plans[step % 2])
            assert np.array_equal(found.tokens, expected.tokens)
            assert np.array_equal(found.prompts, expected.prompts)
    finally:
        feed.close()


def test_a_failing_worker_ends_the_run_with_its_own_error(data):
    feed = Feed(data, data / TRAIN_FILE, 0, lambda _: BatchPlan("list", 64, 1), first=0, workers=1)
    try:
        with pytest.raises(RunError, match="IndexError"):
            feed.next()
    finally:
        feed.close()


def test_the_learning_rate_warms_up_and_falls_to_zero():
    recipe = recipes.get("reference")
    assert recipe.rate(0, 0.0) == pytest.approx(1 / 60)
    assert recipe.rate(500, 0.3) == 1.0
    assert recipe.rate(500, 0.8) == pytest.approx(0.5)
    assert recipe.rate(500, 1.2) == 0.0


def test_every_phase_is_reached_and_the_last_holds_to_the_end():
    recipe = recipes.get("reference")
    lengths = {(plan.kind, plan.length) for step in range(3000) for plan in [recipe.plan(step, step / 3000)]}
    assert lengths == {("block", 512), ("block", 2048), ("block", 8192), ("list", 1024)}
    assert recipe.plan(0, 1.5) == recipe.phases[-1].cycle[0]


@pytest.mark.parametrize("size", [(3, 8, 20), (3, 20, 8)])
def test_newton_schulz_brings_singular_values_near_one(size):
    update = torch.randn(*size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(update))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


def test_what_does_not_fit_is_refused_with_a_remedy(recipe, data, tmp_path):
    with pytest.raises(ConfigError, match="has 700 entries, recipe 'reference' needs 4096"):
        check_material(recipes.get("reference"), 700)
    with pytest.raises(ConfigError, match="generate-data"):
        read_filler(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="holds no filler"):
        read_filler(tmp_path / "bad.npz")
    with pytest.raises(ConfigError, match="did you mean"):
        recipes.get("referense")


def test_training_may_begin_with_a_checkpoints_weights(recipe, data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(recipe, data, first)
    run(replace(recipe, steps=1, warmup_steps=10**9), data, second, start=first)
    for name, tensor in stored(first).items():
        torch.testing.assert_close(tensor, stored(second)[name], rtol=1e-3, atol=1e-3)


def test_a_checkpoint_of_another_shape_is_no_start(recipe, data, tmp_path):
    run(recipe, data, tmp_path / "first")
    other = replace(recipe, shape=replace(recipe.shape, num_layers=3))
    with pytest.raises(ConfigError, match="its shape is not that of recipe 'tiny'"):
        run(other, data, tmp_path / "second", start=tmp_path / "first")


def test_weights_do_not_go_on_with_another_vocabulary(recipe, data, tmp_path):
    """A new tokenizer gives the same ids to other words, which no shape check would notice."""
    started = tmp_path / "started"
    run(replace(recipe, steps=1), data, started)
    run(replace(recipe, steps=1), data, tmp_path / "more", start=started)
    (started / "tokenizer.json").write_text((started / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ConfigError, match="generate-data --vocabulary"):
        run(replace(recipe, steps=1), data, tmp_path / "other", start=started)


def test_the_second_recipe_reads_long_rows_and_words_answers_freely_at_the_end():
    """All steps are of one size, rows fit the model, and what is decoded later is what it was trained on last."""
    longer = recipes.get("longer")
    plans = [plan for phase in longer.phases for plan in phase.cycle]
    assert {plan.tokens for plan in plans} == {65_536}
    assert max(plan.length for plan in plans) <= longer.shape.max_positions
    assert {plan.wording for plan in longer.phases[0].cycle} == {"one"}
    assert {plan.wording for plan in longer.phases[-1].cycle} == {"free"}
    assert {plan.kind for plan in longer.phases[-1].cycle} == {"block", "list"}
    assert max(longer.rate(step, step / longer.steps) for step in range(longer.steps)) == longer.peak
