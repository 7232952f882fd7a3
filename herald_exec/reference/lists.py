"""Numbered lists of questions, for the bidirectional mode: one response holds several answers, then end tokens.

The response has a fixed number of masks, so the order in which a block scheduler fills them matters; each sub-answer is
scored by itself.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from herald_exec.reference.documents import Asker, list_answer, list_prompt
from herald_exec.reference.facts import Question
from herald_exec.reference.scoring import Score, score_sample
from herald_exec.reference.tasks import Material, draw_items, scatter
from herald_pipeline.errors import check_number, raise_problems

MIN_PROMPT = 384
MIN_RESPONSE = 96


@dataclass(frozen=True, slots=True)
class ListSample:
    """A prompt of token ids, its questions in order, and the tokens of one right response with its end token."""

    seed: int
    prompt: tuple[int, ...]
    questions: tuple[Question, ...]
    needed: int


def draw_list(material: Material, prompt_tokens: int, response: int, seed: int) -> ListSample:
    """The list sample of a prompt length, a response length and a seed: one to six questions that fit.

    Parameters
    ----------
    prompt_tokens
        Length of the prompt, at least 384.
    response
        Masks behind it, at least 96.
    """
    raise_problems(
        [
            check_number(prompt_tokens, "prompt_tokens", minimum=MIN_PROMPT, integer=True),
            check_number(response, "response", minimum=MIN_RESPONSE, integer=True),
            check_number(seed, "seed", minimum=0, integer=True),
        ]
    )
    world = material.world(Random(f"held-out-list/{prompt_tokens}/{response}/{seed}"))
    items = draw_items(world, int(prompt_tokens * 0.35))
    pieces = [piece for item in items for piece in item.pieces]
    room = prompt_tokens - sum(map(len, pieces))
    asker = Asker(world, items)
    questions: list[Question] = []
    for _ in range(world.rng.randint(1, 6)):
        longer = [*questions, asker()]
        fits = len(list_answer(world, longer)) < response and len(world.encoder(list_prompt(longer))) <= room
        questions = longer if fits else questions
    while not questions:
        question = asker()
        questions = [question] if len(list_answer(world, [question])) < response else []
    asked = world.encoder(list_prompt(questions))
    haystack = [token for part, _ in scatter(world, pieces, prompt_tokens - len(asked)) for token in part]
    needed = len(list_answer(world, questions)) + 1
    return ListSample(seed, tuple(haystack + asked), tuple(questions), needed)


def split_answers(text: str, count: int) -> list[str]:
    """Sub-answers of a response by their numbers; an answer whose number is missing is empty."""
    answers = []
    for number in range(1, count + 1):
        found = re.search(rf"(?:^|\n){number}\)(.*?)(?=\n{number + 1}\)|\Z)", text, flags=re.DOTALL)
        answers.append(found.group(1) if found else "")
    return answers


def score_list(sample: ListSample, text: str) -> Sequence[Score]:
    """A score for each sub-answer of a response cut at its end token."""
    answers = split_answers(text, len(sample.questions))
    return [score_sample(question, answer) for question, answer in zip(sample.questions, answers, strict=True)]
