"""Training rows: lengths, kinds of tokens, and where answers lie."""

from random import Random

import numpy as np
import pytest
import torch

from herald_exec.reference import SHIPPED, recipe
from herald_exec.reference.documents import ANSWER, END, WORDING, Asker, block_row, list_row
from herald_exec.reference.noise import KIND_WEIGHTS, block_masks, kind_weights, response_mask
from herald_exec.reference.tasks import read_material
from herald_exec.reference.vocabulary import EOS


def rows(material, count=40, length=512):
    return [block_row(material, Random(seed), length) for seed in range(count)]


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_a_row_fills_its_length(material, length):
    for row in rows(material, 6, length):
        assert len(row.tokens) == len(row.kinds) == length


def test_end_tokens_follow_every_answer_to_the_end_of_its_block(material):
    for row in rows(material):
        assert np.array_equal(row.tokens == EOS, row.kinds == END)
        answered = np.isin(row.kinds, (ANSWER, WORDING))
        ends = np.flatnonzero(answered[:-1] & ~answered[1:]) + 1
        for end in ends:
            stop = end // 32 * 32 + 32
            assert set(row.kinds[end:stop]) == {END}
            assert stop == len(row.kinds) or row.kinds[stop] != END


def test_most_answers_start_a_block_and_answers_are_a_fair_share_of_tokens(material):
    starts, answers, total = [], 0, 0
    for row in rows(material, 60):
        answered = np.isin(row.kinds, (ANSWER, WORDING))
        begins = np.flatnonzero(answered[1:] & ~answered[:-1]) + 1
        starts += (begins % 32).tolist()
        answers, total = answers + int(answered.sum()), total + len(row.kinds)
    assert 0.6 < sum(start == 0 for start in starts) / len(starts) < 0.85
    assert 0.12 < answers / total < 0.4


def test_a_row_depends_on_its_seed_alone(material):
    first, again, other = (block_row(material, Random(seed), 512) for seed in (1, 1, 2))
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_a_list_row_ends_in_a_response_of_answers_and_end_tokens(material):
    for seed in range(20):
        row = list_row(material, Random(seed), 512)
        assert len(row.tokens) == 512
        assert set(row.kinds[row.prompt :]) <= {ANSWER, END, WORDING}
        assert row.kinds[-1] == END
        assert ANSWER not in row.kinds[: row.prompt]


def test_worded_in_one_way_a_question_has_one_answer(material):
    world = material.world(Random(5), wording="one")
    items = [world.fact() for _ in range(3)]
    answers = {world.encoder.decode(items[0].ask().answer) for _ in range(20)}
    free = material.world(Random(5), wording="free")
    item = free.fact()
    assert len(answers) == 1
    assert len({free.encoder.decode(item.ask().answer) for _ in range(60)}) > 10


@pytest.mark.parametrize("task", ["fact", "hop", "code", "log"])
def test_aligned_wordings_keep_every_token_of_the_content_in_its_place(task):
    """Answers to one question have one length, differ at five places at least, and never at a field's tokens."""
    world = read_material(SHIPPED, SHIPPED / "filler-held-out.npz").world(Random(5), wording="aligned")
    item = getattr(world, task)()
    answers = [item.ask() for _ in range(200)]
    differing = {
        place for place, tokens in enumerate(zip(*(a.answer for a in answers), strict=True)) if len(set(tokens)) > 1
    }
    assert len(differing) >= 5
    assert not any(answers[0].needed[place] for place in differing)
    assert len({answer.needed for answer in answers}) == 1


def test_the_second_copy_mostly_shows_what_the_first_hides():
    """Shares of the recipe, over many blocks; every position is masked in some copy often enough to be learned."""
    first, second = block_masks(64, 1024, torch.Generator().manual_seed(0))
    first, second = first.view(-1, 32), second.view(-1, 32)
    assert float((second == ~first).all(dim=1).float().mean()) == pytest.approx(0.40, abs=0.04)
    # 20% by choice, a 32nd of the cuts by chance.
    assert float(first.all(dim=1).float().mean()) == pytest.approx(0.20 + 0.45 / 32, abs=0.04)
    assert bool(((first | second).float().mean(dim=0) > 0.7).all())


def test_only_responses_are_masked_in_a_bidirectional_step():
    prompts = torch.tensor([128, 256, 384, 448] * 16)
    masked = response_mask(prompts, 512, torch.Generator().manual_seed(0))
    place = torch.arange(512)
    assert not bool((masked & (place < prompts[:, None])).any())
    share = masked.sum(dim=1) / (512 - prompts)
    assert float(share.mean()) == pytest.approx(0.5, abs=0.1)


def test_weights_follow_kinds():
    kinds = torch.tensor([[0, 1, 2, 3, 4]], dtype=torch.uint8)
    assert kind_weights(kinds)[0].tolist() == pytest.approx([KIND_WEIGHTS[kind] for kind in range(5)])


def test_a_task_in_focus_is_asked_three_times_as_often_beside_its_share(material):
    world = material.world(Random(5))
    items = [world.hop(), world.code(), world.fact()]

    def share(focus):
        asker = Asker(world, items, focus)
        return sum(asker().task == "hop" for _ in range(800)) / 800

    # Beside hop's .22: kv .20, code .14, arith .08; a single fact is too few for multi.
    assert share(()) == pytest.approx(0.22 / 0.64, abs=0.06)
    assert share(("hop",)) == pytest.approx(0.66 / 1.08, abs=0.06)


def test_a_row_in_focus_asks_other_questions_than_the_same_seed_without(material):
    pairs = [[block_row(material, Random(seed), 1024, focus=focus) for focus in ((), ("hop",))] for seed in range(6)]
    assert any((usual.tokens != focused.tokens).any() for usual, focused in pairs)


def test_calibrated_weights_are_alike_for_all_that_may_stand_in_an_answer():
    kinds = torch.tensor([ANSWER, END, WORDING])
    assert len(set(kind_weights(kinds, calibrated=True).tolist())) == 1
    assert len(set(kind_weights(kinds).tolist())) == 3


def test_the_finishing_recipe_asks_what_was_missed_with_calibrated_weights():
    finish = recipe.get("finish")
    assert finish.calibrated
    assert {task for phase in finish.phases for plan in phase.cycle for task in plan.focus} == {"hop", "code"}
    assert not recipe.get("longer").calibrated


def test_an_anchored_run_shows_a_few_tokens_at_any_place_and_leaves_the_first_copy_alone():
    plain, anchored = (
        block_masks(64, 1024, torch.Generator().manual_seed(0), anchored=anchored) for anchored in (False, True)
    )
    assert torch.equal(plain[0], anchored[0])
    shown = ~anchored[1].view(-1, 32)
    changed = (plain[1] != anchored[1]).view(-1, 32).any(dim=1)
    assert float(changed.float().mean()) == pytest.approx(0.30, abs=0.03)
    assert set(shown[changed].sum(dim=1).tolist()) == {1, 2, 3, 4, 5, 6}
    assert float(shown[changed].float().mean(dim=0).std()) < 0.02
