"""What an ended measurement left, and going on from it: a machine or a device that is lost costs one part, not all.

Beside the unfinished profile ``NAME.incomplete.toml`` its raw folder holds ``progress.json``: of what the measurement
was, the parts that are in the profile, the tables that later parts read and the reference's times. The same command
again takes them up. Numbers of another machine, model or thread count are never joined with these.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calibration import profile_file
from calibration.bench import Bench
from herald_pipeline.errors import ConfigError, read_failure

_SUFFIX = ".incomplete"
_PROGRESS = "progress.json"


@dataclass
class Progress:
    """How far a measurement has come.

    Attributes
    ----------
    options
        What it was of: model, device, processors, format, threads. Another measurement is not gone on with.
    only
        Parts that the profile is to have; empty: all.
    done
        Parts whose numbers are in the unfinished profile.
    tables
        :attr:`calibration.bench.Bench.tables`, in seconds.
    references
        Times of the reference so far, in seconds.
    """

    options: dict[str, Any]
    only: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    tables: dict[str, dict[float, float]] = field(default_factory=dict)
    references: list[float] = field(default_factory=list)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Which of ``names``, all parts there are, the profile still lacks."""
        return [name for name in names if name in (self.only or names) and name not in self.done]

    def write(self, profile: Path) -> None:
        """Write it beside the unfinished ``profile``."""
        file = profile_file.raw_folder(profile) / _PROGRESS
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def path_of(out: Path) -> Path:
    """The unfinished file of the profile ``out``."""
    return out.with_suffix(f"{_SUFFIX}{out.suffix}")


def found(so_far: Path, options: dict[str, Any], only: Sequence[str]) -> Progress | None:
    """Progress that the same measurement left at ``so_far``; ``None`` where there is none, or it was of something else.

    ``only`` with other parts than then measures those anew, with what is there as their base.

    Raises
    ------
    ConfigError
        What lies there cannot be read.
    """
    file = profile_file.raw_folder(so_far) / _PROGRESS
    if not (so_far.is_file() and file.is_file()):
        return None
    try:
        kept = Progress(**json.loads(file.read_text(encoding="utf-8")))
        kept.tables = {name: {float(x): y for x, y in table.items()} for name, table in kept.tables.items()}
    except (OSError, UnicodeDecodeError, ValueError, TypeError, AttributeError) as problem:
        raise ConfigError(
            f"{file} is not a measurement's progress ({read_failure(problem)}); delete {so_far} to begin anew"
        ) from None
    if differences(kept.options, options):
        return None
    if only and sorted(only) != sorted(kept.only):
        kept.done = [name for name in kept.done if name not in only]
    return kept


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Options in which two measurements differ, as text."""
    return [f"{key} {before.get(key)!r}, now {now[key]!r}" for key in now if before.get(key) != now[key]]


def take_up(bench: Bench, progress: Progress) -> None:
    """Put the tables of earlier parts where later ones read them."""
    bench.tables.update(progress.tables)


def finish(so_far: Path, out: Path) -> None:
    """Move the raw tables of earlier calls to the finished profile's and drop the unfinished file."""
    before, folder = profile_file.raw_folder(so_far), profile_file.raw_folder(out)
    for table in sorted(before.glob("*.csv")):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(table, folder / table.name)
    so_far.unlink(missing_ok=True)
    shutil.rmtree(before, ignore_errors=True)
