"""Commits that a real run recorded, and their replay through a block scheduler and a cache rule.

``herald-exec bench-decoding --json`` writes the recordings; commits stay as recorded, so that only the cache rule (or a
schedule whose blocks hold the same commits) may differ from the recorded run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from herald_pipeline.decoding.caches import CacheRule
from herald_pipeline.decoding.schedulers import BlockState, Scheduler
from herald_pipeline.decoding.statistics import RoundRecord, record_round
from herald_pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recording:
    """Commits of one request: ``commits[round]`` are positions counted from the response's start.

    ``decoder``, ``scheduler`` and ``cache`` say what it was recorded under, where that is known.
    """

    prompt_tokens: int
    commits: tuple[tuple[int, ...], ...]
    decoder: str = ""
    scheduler: str = ""
    cache: str = ""

    @property
    def response_tokens(self) -> int:
        """All positions of the response; every one is committed once."""
        return sum(len(positions) for positions in self.commits)


def _recording(row: Any, where: str) -> Recording:
    if not isinstance(row, dict) or not {"prompt_tokens", "commits"} <= set(row):
        message = f'{where} must hold "prompt_tokens" and "commits" (lists of positions, one a round)'
        raise ConfigError(message)
    try:
        commits = tuple(tuple(int(p) for p in positions) for positions in row["commits"])
        prompt = int(row["prompt_tokens"])
    except (TypeError, ValueError):
        message = f"{where}: prompt_tokens must be a whole number, and commits lists of positions, one list a round"
        raise ConfigError(message) from None
    seen = sorted(p for positions in commits for p in positions)
    if not seen or seen != list(range(len(seen))):
        message = f"{where}: commits must name every position of the response from 0 on exactly once"
        raise ConfigError(message)
    if prompt < 0:
        message = f"{where}: prompt_tokens must be >= 0, got {prompt}"
        raise ConfigError(message)
    names = {name: str(row.get(name, "")) for name in ("decoder", "scheduler", "cache")}
    return Recording(prompt, commits, **names)


def read_recordings(path: str | Path, **conditions: str) -> list[Recording]:
    """Recordings from the JSON of ``herald-exec bench-decoding`` (its ``rows``), or from a plain list of such rows.

    ``conditions`` keep those recorded under a ``decoder``, ``scheduler`` or ``cache``.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"commits file {path}: {error}"
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
        message = "a recording does not say where delimiters were, so scheduler 'adablock' cannot be replayed"
        raise ConfigError(message)
    prompt = np.asarray([r.prompt_tokens for r in recordings])
    response = np.asarray([r.response_tokens for r in recordings])
    place = np.arange(int((prompt + response).max()))[None, :]
    masked = (place >= prompt[:, None]) & (place < (prompt + response)[:, None])
    state = blocks.start(prompt, response)
    cache = cached.start(state, masked)
    records = []
    for number in range(max(len(r.commits) for r in recordings)):
        accepted = np.zeros_like(masked)
        for row, recording in enumerate(recordings):
            positions = recording.commits[number] if number < len(recording.commits) else ()
            accepted[row, [recording.prompt_tokens + p for p in positions]] = True
        _check_inside(accepted & ~state.active(masked), number, recordings, state)
        plan = cached.plan(cache, state, masked, upcoming=accepted, predecessor=shifted_logits)
        records.append(record_round(plan, state, masked, accepted))
        after = blocks.advance(state, masked, accepted)
        cache = cached.observe(cache, plan, state, after, accepted, blocks)
        state, masked = after, masked & ~accepted
    return records


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
