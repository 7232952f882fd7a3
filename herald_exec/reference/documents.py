"""Training rows: a haystack, then many questions about it; or plain text; or a numbered list of questions.

Asking densely is what makes recall form quickly: about a fifth of all tokens are answers. Every answer is followed by
end tokens up to its block's end, and most answers start a block, as in serving.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from herald_exec.reference.facts import Item, Question, World
from herald_exec.reference.tasks import SHARES, Material, draw_items, scatter
from herald_exec.reference.vocabulary import EOS

BLOCK = 32
TEXT, STATED, ANSWER, END, WORDING = 0, 1, 2, 3, 4
"""Kinds of tokens: filler; facts and questions; what an answer must contain; end tokens behind an answer; the rest of
an answer, which could have been worded in another way."""

PLAIN_SHARE = 0.08
ALIGNED_SHARE = 0.7
FOCUS = 3
"""How many times as often as its share a task in focus is asked."""
RESPONSES = (96, 128, 192, 256, 384)
"""Response lengths of rows for the bidirectional mode."""


class Row(NamedTuple):
    """``tokens`` and their ``kinds``; ``prompt`` is where a bidirectional row's response starts."""

    tokens: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    prompt: int


@dataclass
class _Builder:
    """A row that grows to ``length`` tokens."""

    length: int

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.kinds: list[int] = []

    @property
    def room(self) -> int:
        return self.length - len(self.tokens)

    def add(self, tokens: "list[int] | tuple[int, ...]", kind: int) -> None:
        self.tokens += tokens
        self.kinds += [kind] * len(tokens)

    def add_answer(self, question: Question) -> None:
        self.tokens += question.answer
        self.kinds += [ANSWER if needed else WORDING for needed in question.needed]

    def row(self, prompt: int = 0) -> Row:
        assert self.room == 0
        return Row(np.asarray(self.tokens, dtype=np.uint16), np.asarray(self.kinds, dtype=np.uint8), prompt)


class Asker:
    """Questions about a document's items, in random order; items come again only when all were asked.

    Tasks in ``focus`` are asked :data:`FOCUS` times as often as the others, beside their shares.
    """

    def __init__(self, world: World, items: list[Item], focus: Sequence[str] = ()) -> None:
        self._world = world
        self._by_task: dict[str, list[Item]] = {}
        for item in world.rng.sample(items, len(items)):
            self._by_task.setdefault(item.task, []).append(item)
        self._asked = dict.fromkeys(self._by_task, 0)
        able = {*self._by_task, "arith"} | ({"multi"} if len(world.facts) >= 2 else set())
        self._tasks = [task for task in SHARES if task in able]
        self._weights = [SHARES[task] * (FOCUS if task in focus else 1) for task in self._tasks]

    def __call__(self) -> Question:
        """The next question."""
        task = self._world.rng.choices(self._tasks, self._weights)[0]
        if task == "arith":
            return self._world.ask_arithmetic()
        if task == "multi":
            return self._world.ask_multi()
        items = self._by_task[task]
        item = items[self._asked[task] % len(items)]
        self._asked[task] += 1
        return item.ask()


def _haystack(builder: _Builder, world: World, length: int) -> list[Item]:
    filler_share = world.rng.uniform(0.05, 0.85)
    items = draw_items(world, int(length * (1 - filler_share)))
    pieces = [piece for item in items for piece in item.pieces]
    for part, is_filler in scatter(world, pieces, length):
        builder.add(list(part), TEXT if is_filler else STATED)
    return items


def _ask_until_full(builder: _Builder, world: World, items: list[Item], focus: Sequence[str]) -> None:
    asker = Asker(world, items, focus)
    while True:
        question = asker()
        asked = world.encoder(question.prompt)
        aligned = world.rng.random() < ALIGNED_SHARE
        padding = -(len(builder.tokens) + len(asked)) % BLOCK if aligned else 0
        start = len(builder.tokens) + padding + len(asked)
        # At least one end token, then to the end of the block.
        end = (start + len(question.answer)) // BLOCK * BLOCK + BLOCK
        if end > builder.length:
            builder.add(world.filler.draw(world.rng, builder.room), TEXT)
            return
        builder.add(world.filler.draw(world.rng, padding), TEXT)
        builder.add(asked, STATED)
        builder.add_answer(question)
        builder.add([EOS] * (end - start - len(question.answer)), END)


def block_row(material: Material, rng: Random, length: int, *, wording: str = "free", focus: Sequence[str] = ()) -> Row:
    """A row for the block-causal mode; long rows are often two documents, one after another.

    ``wording`` says how answers are worded (:mod:`herald_exec.reference.wordings`), ``focus`` what is asked most
    (:class:`Asker`).
    """
    builder = _Builder(length)
    if rng.random() < PLAIN_SHARE:
        builder.add(material.filler.draw(rng, length), TEXT)
        return builder.row()
    parts = 2 if length >= 2048 and rng.random() < 0.4 else 1
    for part in range(1, parts + 1):
        world = material.world(rng, wording=wording)
        builder.length = length * part // parts
        items = _haystack(builder, world, int(builder.room * rng.uniform(0.25, 0.7)))
        _ask_until_full(builder, world, items, focus)
    return builder.row()


def list_prompt(questions: list[Question]) -> str:
    """Several questions as a numbered list."""
    lines = "".join(f"\n{number}) {question.text}" for number, question in enumerate(questions, start=1))
    return f"\nQuestions:{lines}\nAnswers:"


def list_answer(world: World, questions: list[Question]) -> list[int]:
    """Their answers, numbered alike."""
    answer: list[int] = []
    for number, question in enumerate(questions, start=1):
        answer += [*world.encoder(f"\n{number})"), *question.answer]
    return answer


def list_row(material: Material, rng: Random, length: int, *, wording: str = "free", focus: Sequence[str] = ()) -> Row:
    """A row for the bidirectional mode: haystack and a list of one to six questions, then the response."""
    builder = _Builder(length)
    world = material.world(rng, wording=wording)
    response = rng.choice([size for size in RESPONSES if size <= length // 2])
    items = draw_items(world, int((length - response) * rng.uniform(0.15, 0.6)))
    pieces = [piece for item in items for piece in item.pieces]
    room = length - response - sum(map(len, pieces))
    asker = Asker(world, items, focus)
    questions = [asker() for _ in range(rng.randint(1, 6))]
    while True:
        answer, asked = list_answer(world, questions), world.encoder(list_prompt(questions))
        if len(answer) < response and len(asked) <= room:
            break
        questions.pop()
    for part, is_filler in scatter(world, pieces, length - response - len(asked)):
        builder.add(list(part), TEXT if is_filler else STATED)
    builder.add(asked, STATED)
    for number, question in enumerate(questions, start=1):
        builder.add(world.encoder(f"\n{number})"), WORDING)
        builder.add_answer(question)
    builder.add([EOS] * builder.room, END)
    return builder.row(prompt=length - response)
