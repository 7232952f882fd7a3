"""Tasks of the reference model: documents with questions about them, and samples that training never draws.

A sample's haystack is made of held-out filler, its facts of random names and values. Its prompt fills ``context``
tokens exactly and ends where a block ends, so that the answer starts a block, as in serving.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from herald_exec.reference import wordings
from herald_exec.reference.facts import Item, Question, World
from herald_exec.reference.filler import Filler, read_filler
from herald_exec.reference.vocabulary import Encoder, key_words
from herald_pipeline.errors import ConfigError, check_number, raise_problems, unknown_name

TASKS = ("kv", "multi", "hop", "code", "log", "rec", "arith")
"""One value; two to four values; a value behind a relation; a constant; a log line as JSON; a passage; arithmetic."""

SHARES = {"kv": 0.20, "multi": 0.18, "hop": 0.22, "code": 0.14, "log": 0.10, "rec": 0.08, "arith": 0.08}
"""How often training asks each; most often what the first run was worst at."""

MAX_ANSWER_TOKENS = {"kv": 32, "multi": 96, "hop": 64, "code": 32, "log": 96, "rec": 96, "arith": 128}
"""Whole blocks of 32 that a right answer with its end token needs at most."""

WORDING = "aligned"
"""How the shipped weights word their answers (:mod:`herald_exec.reference.wordings`)."""

MIN_CONTEXT = 256
_ITEM_SHARE = 0.3
_CHUNK = 400
_FEWEST_WORDS = 8


@dataclass(frozen=True)
class Material:
    """What documents are drawn from: a tokenizer, filler, and the words of names."""

    encoder: Encoder
    filler: Filler
    single: tuple[str, ...]
    double: tuple[str, ...]

    def world(self, rng: Random, *, wording: str = WORDING) -> World:
        """A fresh document's world."""
        return World(rng, self.encoder, self.filler, self.single, self.double, wordings.wording(wording, rng))


def read_material(folder: Path, filler: Path) -> Material:
    """Material of a folder with ``tokenizer.json`` and ``words.txt``, and one filler file."""
    for name in ("tokenizer.json", "words.txt"):
        if not (folder / name).exists():
            message = f"{folder} has no {name}; make it with: python -m herald_exec.reference generate-data"
            raise ConfigError(message)
    encoder = Encoder.from_file(folder / "tokenizer.json")
    words = (folder / "words.txt").read_text(encoding="utf-8").split()
    single, double = key_words(words, encoder)
    if len(single) < _FEWEST_WORDS:
        message = f"{folder / 'words.txt'} has {len(single)} one-token words, {_FEWEST_WORDS} are needed for names"
        raise ConfigError(message)
    return Material(encoder, read_filler(filler), tuple(single), tuple(double))


@dataclass(frozen=True, slots=True)
class Sample:
    """One evaluation prompt.

    Attributes
    ----------
    prompt
        Token ids, ``context`` of them.
    answer
        Token ids of one right wording.
    fields
        What a right answer contains; scored by :mod:`herald_exec.reference.scoring`.
    """

    task: str
    context: int
    seed: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    fields: tuple[str, ...]


def draw_item(world: World, task: str) -> Item:
    """An item that lets a question of ``task`` be asked (``multi`` needs several facts)."""
    match task:
        case "hop":
            return world.hop()
        case "code":
            return world.code()
        case "log":
            return world.log()
        case "rec":
            return world.passage()
        case _:
            return world.fact()


def scatter(world: World, pieces: Sequence[Sequence[int]], length: int) -> list[tuple[Sequence[int], bool]]:
    """Pieces in random order with filler between them, ``length`` tokens in all; flags say which part is filler."""
    rng = world.rng
    order = rng.sample(list(pieces), len(pieces))
    room = length - sum(map(len, order))
    cuts = sorted(rng.randint(0, room) for _ in order)
    parts: list[tuple[Sequence[int], bool]] = []
    previous = 0
    for cut, piece in zip([*cuts, room], [*order, ()], strict=True):
        while previous < cut:
            chunk = min(_CHUNK, cut - previous)
            parts.append((world.filler.draw(rng, chunk), True))
            previous += chunk
        if piece:
            parts.append((piece, False))
    return parts


def draw_items(world: World, budget: int, first: Sequence[str] = ()) -> list[Item]:
    """Items whose pieces take at most ``budget`` tokens; those of the tasks ``first`` in any case."""
    items = [draw_item(world, task) for task in first]
    used = sum(len(piece) for item in items for piece in item.pieces)
    kinds = ("kv", "kv", "kv", "hop", "hop", "code", "code", "log", "rec")
    while True:
        item = draw_item(world, world.rng.choice(kinds))
        used += sum(map(len, item.pieces))
        if used > budget:
            if item.task == "kv":
                # The haystack does not hold it, so multi must not ask for it.
                world.facts.pop()
            return items
        items.append(item)


def _ask(world: World, task: str, items: Sequence[Item]) -> Question:
    if task == "arith":
        return world.ask_arithmetic()
    if task == "multi":
        return world.ask_multi()
    return items[0].ask()


def draw_sample(material: Material, task: str, context: int, seed: int) -> Sample:
    """The sample of a task, a context and a seed; the same three give the same sample everywhere.

    Parameters
    ----------
    context
        Prompt tokens, a multiple of 32 and at least 256.
    """
    if task not in TASKS:
        raise unknown_name(kind="task", name=task, valid=TASKS)
    problems = [
        check_number(context, "context", minimum=MIN_CONTEXT, integer=True),
        check_number(seed, "seed", minimum=0, integer=True),
    ]
    if not problems[0] and context % 32:
        problems.append(f"context: {context} is no multiple of the block length 32; use {context // 32 * 32}")
    raise_problems(problems)
    world = material.world(Random(f"held-out/{task}/{context}/{seed}"))
    first = {"multi": ("kv",) * 4, "arith": ()}.get(task, (task,))
    items = draw_items(world, int(context * _ITEM_SHARE), first)
    question = _ask(world, task, items)
    asked = material.encoder(question.prompt)
    pieces = [piece for item in items for piece in item.pieces]
    haystack = [token for part, _ in scatter(world, pieces, context - len(asked)) for token in part]
    return Sample(task, context, seed, tuple(haystack + asked), question.answer, question.fields)


def draw_samples(material: Material, task: str, context: int, count: int, first_seed: int = 0) -> Iterator[Sample]:
    """``count`` samples with consecutive seeds."""
    return (draw_sample(material, task, context, seed) for seed in range(first_seed, first_seed + count))
