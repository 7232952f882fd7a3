"""Commits that a real run recorded, and their replay through a block scheduler and a cache rule.

``herald-exec bench-decoding --json`` writes the recordings. Commits stay as recorded, and so do block ends that the
text decided, so that only the cache rule (or a schedule whose blocks hold the same commits) may differ from the run.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from herald_pipeline.decoding.caches import CacheRule
from herald_pipeline.decoding.schedulers import BlockState, Scheduler
from herald_pipeline.decoding.statistics import RoundRecord, record_round
from herald_pipeline.errors import ConfigError, read_failure


@dataclass(frozen=True, slots=True)
class Recording:
    """Commits of one request.

    Parameters
    ----------
    prompt_tokens
        Length of the prompt.
    commits
        ``commits[round]``: positions, counted from the response's start.
    decoder, scheduler, cache
        What it was recorded under, where that is known.
    ends
        ``ends[round]``: end of the block that the round committed in, counted from the response's start. A schedule
        whose ends depend on the text (AdaBlock) is replayed from them; the others find their ends themselves.
    length
        Positions of the response that were asked for, where a run that stopped at its EOS left some masked; without it
        every position was committed.
    """

    prompt_tokens: int
    commits: tuple[tuple[int, ...], ...]
    decoder: str = ""
    scheduler: str = ""
    cache: str = ""
    ends: tuple[int, ...] | None = None
    length: int | None = None

    @property
    def response_tokens(self) -> int:
        """All positions of the response."""
        return sum(len(positions) for positions in self.commits) if self.length is None else self.length


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise TypeError
    return tuple(values)


def _commit_problem(commits: tuple[tuple[int, ...], ...], length: int | None) -> str | None:
    seen = sorted(p for positions in commits for p in positions)
    if length is None or len(seen) >= length:
        if not seen or seen != list(range(len(seen))) or (length is not None and len(seen) != length):
            return "commits must name every position of the response from 0 on exactly once"
        return None
    if not seen or len(set(seen)) != len(seen) or not 0 <= seen[0] <= seen[-1] < length:
        return f"commits must name positions from 0 to {length - 1} (response_tokens - 1), none of them twice"
    return None


def _end_problem(ends: tuple[int, ...], commits: tuple[tuple[int, ...], ...], length: int) -> str | None:
    if len(ends) != len(commits):
        return f"ends must name one block end a round: {len(ends)} ends for {len(commits)} rounds"
    for number, (end, positions) in enumerate(zip(ends, commits, strict=True)):
        if not max(positions, default=0) < end <= length:
            return (
                f"the block of round {number} ends at {end}; it must end right of the round's commits and at most "
                f"at the response's end, {length}"
            )
    return None


def _recording(row: Any, where: str) -> Recording:
    if not isinstance(row, dict) or not {"prompt_tokens", "commits"} <= set(row):
        message = f'{where} must hold "prompt_tokens" and "commits" (lists of positions, one a round)'
        raise ConfigError(message)
    try:
        commits = tuple(_whole_numbers(positions) for positions in row["commits"])
        ends = None if row.get("ends") is None else _whole_numbers(row["ends"])
        (prompt,) = _whole_numbers([row["prompt_tokens"]])
        length = None if row.get("response_tokens") is None else _whole_numbers([row["response_tokens"]])[0]
    except TypeError:
        message = (
            f"{where}: prompt_tokens and response_tokens must be whole numbers, commits lists of positions, one list a "
            "round, and ends one position a round"
        )
        raise ConfigError(message) from None
    problem = _commit_problem(commits, length)
    if prompt < 0:
        problem = f"prompt_tokens must be >= 0, got {prompt}"
    names = {name: str(row.get(name, "")) for name in ("decoder", "scheduler", "cache")}
    recording = Recording(prompt, commits, **names, ends=ends, length=length)
    if problem is None and ends is not None:
        problem = _end_problem(ends, commits, recording.response_tokens)
    if problem is not None:
        message = f"{where}: {problem}"
        raise ConfigError(message)
    return recording


def read_recordings(path: str | Path, **conditions: str) -> list[Recording]:
    """Recordings from the JSON of ``herald-exec bench-decoding`` (its ``rows``), or from a plain list of such rows.

    ``conditions`` keep those recorded under a ``decoder``, ``scheduler`` or ``cache``.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"commits file {path} cannot be read: {read_failure(error)}"
        raise ConfigError(message) from None
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        message = f'{path} must hold a list of rows, or an object with "rows"'
        raise ConfigError(message)
    found = [_recording(row, f"{path}, row {index}") for index, row in enumerate(rows)]
    kept = [r for r in found if all(getattr(r, name) == wanted for name, wanted in conditions.items())]
    if not kept:
        choices = sorted({(r.decoder, r.scheduler, r.cache) for r in found})
        listed = "; ".join(" + ".join(choice) for choice in choices) or "nothing"
        message = f"{path} holds no recording under {conditions}; it holds {listed}"
        raise ConfigError(message)
    return kept


def replay(
    recordings: Sequence[Recording], blocks: Scheduler, cached: CacheRule, *, shifted_logits: bool = False
) -> list[RoundRecord]:
    """Rounds of all recordings in one batch, through ``blocks`` and ``cached``.

    Raises
    ------
    ConfigError
        A recorded commit lies outside the block of the scheduler: it was recorded under another one.
    """
    if blocks.needs_delimiters:
        _check_ends(recordings)
    prompt = np.asarray([r.prompt_tokens for r in recordings])
    response = np.asarray([r.response_tokens for r in recordings])
    rounds = np.asarray([len(r.commits) for r in recordings])
    place = np.arange(int((prompt + response).max()))[None, :]
    masked = (place >= prompt[:, None]) & (place < (prompt + response)[:, None])
    state = blocks.start(prompt, response)
    cache = cached.start(state, masked)
    records = []
    for number in range(int(rounds.max())):
        accepted = np.zeros_like(masked)
        for row, recording in enumerate(recordings):
            positions = recording.commits[number] if number < len(recording.commits) else ()
            accepted[row, [recording.prompt_tokens + p for p in positions]] = True
        plan = cached.plan(cache, state, masked, upcoming=accepted, predecessor=shifted_logits)
        if blocks.needs_delimiters:
            state = _opened(state, number, recordings)
        _check_inside(accepted & ~state.active(masked), number, recordings, state)
        records.append(record_round(plan, state, masked, accepted))
        after = blocks.advance(state, masked, accepted)
        cache = cached.observe(cache, plan, state, after, accepted, blocks)
        # A run that stopped at its EOS ends with its last round, whatever is masked then.
        whole = after.end - after.prompt
        state = dataclasses.replace(after, U=np.where(rounds <= number + 1, whole, after.U))
        masked = masked & ~accepted
    return records


def _check_ends(recordings: Sequence[Recording]) -> None:
    without = [row for row, recording in enumerate(recordings) if recording.ends is None]
    if without:
        message = (
            f"recording {without[0]} does not say where its blocks ended, and scheduler 'adablock' ends them where the "
            'text does; record again with herald-exec bench-decoding, whose rows hold "ends"'
        )
        raise ConfigError(message)


def _opened(state: BlockState, number: int, recordings: Sequence[Recording]) -> BlockState:
    """``state`` with the recorded ends in blocks that are not opened yet."""
    ends = [
        r.prompt_tokens + r.ends[number] if r.ends is not None and number < len(r.ends) else int(e)
        for r, e in zip(recordings, state.e, strict=True)
    ]
    return dataclasses.replace(state, e=np.where(state.e == state.s, np.asarray(ends), state.e))


def _check_inside(outside: Any, number: int, recordings: Sequence[Recording], state: BlockState) -> None:
    if not outside.any():
        return
    row, position = (int(index) for index in np.argwhere(outside)[0])
    under = recordings[row].scheduler or "another scheduler"
    message = (
        f"round {number} of recording {row} commits position {position}, outside the block "
        f"[{int(state.s[row])}, {int(state.e[row])}): it was recorded under {under!r} with other settings; "
        "record again with the scheduler to be simulated"
    )
    raise ConfigError(message)
