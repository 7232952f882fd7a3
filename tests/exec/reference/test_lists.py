"""Lists of questions: prompts of exact length, responses cut and scored by number."""

import pytest

from herald_exec.reference.documents import list_answer
from herald_exec.reference.lists import draw_list, score_list, split_answers
from herald_pipeline.errors import ConfigError


def test_a_right_response_scores_one_everywhere_and_leaves_room(material):
    for seed in range(12):
        sample = draw_list(material, 768, 256, seed)
        assert len(sample.prompt) == 768
        assert sample.needed <= 256
        response = list_answer(material.world(None), list(sample.questions))
        assert all(score == (1, 1) for score in score_list(sample, material.encoder.decode(response)))


def test_a_sub_answer_under_another_number_does_not_count(material):
    sample = next(s for s in (draw_list(material, 768, 256, seed) for seed in range(40)) if len(s.questions) > 1)
    swapped = list_answer(material.world(None), list(reversed(sample.questions)))
    assert score_list(sample, material.encoder.decode(swapped))[0].exact == 0


def test_answers_are_cut_at_their_numbers_and_a_missing_one_is_empty():
    assert split_answers("\n1) one\n - x: 2\n2) two", 3) == [" one\n - x: 2", " two", ""]
    assert split_answers("no number", 1) == [""]


@pytest.mark.parametrize(("prompt", "response", "words"), [(100, 256, "prompt_tokens"), (768, 10, "response")])
def test_too_short_lists_are_refused(material, prompt, response, words):
    with pytest.raises(ConfigError, match=words):
        draw_list(material, prompt, response, 0)
