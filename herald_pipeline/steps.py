"""T, the denoising steps of each block: fixed, listed, drawn from a distribution, or recorded by a real run.

A plan answers for any (request, block) without having seen the ones before, so that neither the order of the rows nor
the batch changes what a request does. T counts the steps that accept tokens; the completing forward comes on top.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems, read_failure


@runtime_checkable
class Steps(Protocol):
    """Plan of the denoising steps."""

    def steps(self, request: int, block: int) -> int:
        """T of this block of this request."""
        ...

    def commits(self, request: int, block: int) -> tuple[int, ...]:
        """Tokens accepted in each of the T steps; they sum to B."""
        ...


def even_commits(steps: int, block_length: int) -> tuple[int, ...]:
    """floor(B / T) tokens a step, and one more in the first B mod T steps."""
    each, rest = divmod(block_length, steps)
    return (each + 1,) * rest + (each,) * (steps - rest)


@dataclass(frozen=True, slots=True)
class FixedSteps:
    """The same T in every block."""

    count: int
    block_length: int = 32

    def __post_init__(self) -> None:
        raise_problems([_check_steps(self.count, "steps", self.block_length)])

    def steps(self, request: int, block: int) -> int:
        """T."""
        return self.count

    def commits(self, request: int, block: int) -> tuple[int, ...]:
        """An even share of the block in each step."""
        return even_commits(self.count, self.block_length)


@dataclass(frozen=True, slots=True)
class ListedSteps:
    """T by request and block; requests and blocks beyond the list begin it again.

    ``rows[r][n]`` is T of block n of request r.
    """

    rows: tuple[tuple[int, ...], ...]
    block_length: int = 32

    def __post_init__(self) -> None:
        if not self.rows or not all(self.rows):
            message = "steps: the list is empty; give at least one T for one block"
            raise ConfigError(message)
        raise_problems(
            _check_steps(count, f"steps: request {r}, block {n}", self.block_length)
            for r, row in enumerate(self.rows)
            for n, count in enumerate(row)
        )

    def steps(self, request: int, block: int) -> int:
        """T as listed."""
        row = self.rows[request % len(self.rows)]
        return row[block % len(row)]

    def commits(self, request: int, block: int) -> tuple[int, ...]:
        """An even share of the block in each step."""
        return even_commits(self.steps(request, block), self.block_length)


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Accepted tokens of every step, as a real run recorded them; T is how many steps there are.

    ``rows[r][n]`` are the counts of block n of request r; they sum to B, or to fewer where a prompt's tail filled part
    of the block. ``window`` is W of a run whose window slides (0: none does): a step then counts what it accepted in
    the whole window, so that a block may hold up to W, take up to W steps, or take one that finds all of it committed.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    block_length: int = 32
    window: int = 0

    def __post_init__(self) -> None:
        problems: list[str | None] = []
        ahead = self.window > self.block_length
        most, least = (self.window, 0) if ahead else (self.block_length, 1)
        if not self.rows or not all(self.rows):
            problems.append("commits: the recording is empty; give at least one block of one request")
        for r, row in enumerate(self.rows):
            for n, counts in enumerate(row):
                path = f"commits: request {r}, block {n}"
                problems.append(_check_steps(len(counts), path, most, "window" if ahead else "block length"))
                problems += [check_number(count, path, minimum=0, integer=True) for count in counts]
                if not any(problems) and not least <= sum(counts) <= most:
                    problems.append(f"{path} must sum to {least}..{most} tokens, got {sum(counts)}")
        if any(problems) and any(sum(counts) > most for row in self.rows for counts in row) and not ahead:
            problems.append(
                "a recording with more tokens in a block than B is of a window that slides, or of another --block; "
                "`herald-sim run --method herald-sliding --commits` replays the former"
            )
        raise_problems(problems)

    def steps(self, request: int, block: int) -> int:
        """Steps recorded."""
        return len(self.commits(request, block))

    def commits(self, request: int, block: int) -> tuple[int, ...]:
        """Counts recorded."""
        row = self.rows[request % len(self.rows)]
        return row[block % len(row)]


@dataclass(frozen=True, slots=True)
class DrawnSteps:
    """T drawn for each block on its own, clipped to 1..B.

    ``kind`` is ``uniform`` (low and high, both included), ``normal`` (mean and standard deviation) or ``geometric``
    (mean and unused 0).
    """

    kind: str
    first: float
    second: float
    block_length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _DISTRIBUTIONS:
            message = f"steps: unknown distribution {self.kind!r}{did_you_mean(self.kind, _DISTRIBUTIONS)}"
            raise ConfigError(message)
        names = _DISTRIBUTIONS[self.kind]
        problems = [
            check_number(self.first, f"steps: {names[0]}", minimum=1, maximum=self.block_length),
            check_number(self.second, f"steps: {names[1]}", minimum=0),
        ]
        if not any(problems) and self.kind == "uniform" and not self.first <= self.second <= self.block_length:
            problems.append(f"steps: high must be {self.first:g}..{self.block_length}, got {self.second:g}")
        raise_problems(problems)

    def steps(self, request: int, block: int) -> int:
        """T drawn from a generator that this request and block alone seed."""
        draw = random.Random(f"{self.seed}:{request}:{block}")
        match self.kind:
            case "uniform":
                value = draw.randint(round(self.first), round(self.second))
            case "normal":
                value = round(draw.gauss(self.first, self.second))
            case _:
                value = 1
                while draw.random() > 1 / self.first and value < self.block_length:
                    value += 1
        return min(self.block_length, max(1, value))

    def commits(self, request: int, block: int) -> tuple[int, ...]:
        """An even share of the block in each step."""
        return even_commits(self.steps(request, block), self.block_length)


_DISTRIBUTIONS = {
    "uniform": ("low", "high"),
    "normal": ("mean", "standard deviation"),
    "geometric": ("mean", "unused"),
}


def _check_steps(count: object, path: str, most: int, what: str = "block length") -> str | None:
    problem = check_number(count, path, minimum=1, integer=True)
    if problem is None and isinstance(count, int | float) and count > most:
        return f"{path} must be <= {what} {most} (every step accepts at least one token), got {count:g}"
    return problem


def parse(text: str, block_length: int = 32, seed: int = 0) -> Steps:
    """Plan out of an option's text: ``20``, ``20,12,8``, ``uniform:8,24``, ``normal:20,4`` or ``geometric:6``."""
    kind, separator, arguments = text.partition(":")
    if not separator:
        counts = tuple(_number(part, "steps") for part in text.split(","))
        if len(counts) == 1:
            return FixedSteps(_whole(counts[0], "steps"), block_length)
        return ListedSteps((tuple(_whole(count, "steps") for count in counts),), block_length)
    values = [_number(part, "steps") for part in arguments.split(",")]
    wanted = 1 if kind == "geometric" else 2
    if kind in _DISTRIBUTIONS and len(values) != wanted:
        message = (
            f"steps: {kind} takes {wanted} number(s) ({', '.join(_DISTRIBUTIONS[kind][:wanted])}), got {arguments!r}"
        )
        raise ConfigError(message)
    return DrawnSteps(kind, values[0], values[1] if len(values) > 1 else 0.0, block_length, seed)


def read_steps(path: str | Path, block_length: int = 32) -> Steps:
    """T from a file: one line a request, comma-separated by block; or JSON ``[T, ..]`` or ``[[T, ..], ..]``."""
    text, where = _text(path)
    if text.lstrip().startswith("["):
        data = _json(text, where)
        nested = [isinstance(row, list) for row in data]
        if any(nested) and not all(nested):
            message = f"{where} must hold one list of T by block, or one such list a request; it mixes both"
            raise ConfigError(message)
        rows = data if any(nested) else [data]
        return ListedSteps(tuple(tuple(_whole(value, where) for value in row) for row in rows), block_length)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    rows = [[_number(part, where) for part in line.split(",") if part.strip()] for line in lines]
    return ListedSteps(tuple(tuple(_whole(value, where) for value in row) for row in rows), block_length)


def read_commits(path: str | Path, block_length: int = 32, window: int = 0) -> RecordedSteps:
    """Accepted tokens by request, block and step, from JSON ``[[[tokens, ..], ..], ..]``; ``window`` as above."""
    text, where = _text(path)
    if '"commits"' in text:
        message = (
            f"{where} names positions a round, as `herald-exec bench-decoding --json` records them; only `herald-sim "
            "run --method dense` with a --cache or --scheduler replays that"
        )
        raise ConfigError(message)
    rows = _json(text, where)
    try:
        nested = tuple(tuple(tuple(_whole(count, where) for count in block) for block in row) for row in rows)
    except TypeError:
        message = f"{where} must hold lists of requests of blocks of token counts, for example [[[2, 30], [32]]]"
        raise ConfigError(message) from None
    return RecordedSteps(nested, block_length, window)


def _text(path: str | Path) -> tuple[str, str]:
    try:
        return Path(path).read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {path}: {read_failure(error)}"
        raise ConfigError(message) from None


def _json(text: str, where: str) -> Sequence[Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{where} is not valid JSON: {error}"
        raise ConfigError(message) from None
    if not isinstance(data, list):
        message = f"{where} must hold a JSON list, got {type(data).__name__}"
        raise ConfigError(message)
    return data


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{where}: {text.strip()!r} is not a number"
        raise ConfigError(message) from None


def _whole(value: object, where: str) -> int:
    raise_problems([check_number(value, where, integer=True)])
    assert isinstance(value, int | float)
    return int(value)
