"""The papers' printed numbers, typed, and the ledger of their claims. The only place where published numbers live.

``herald_published.csv`` and ``dsb_published.csv`` hold one printed value a row; where a paper only draws a point, the
value is empty and stays so (nothing is digitised from a plot). ``claims.toml`` has one entry per numeric sentence.
"""

import csv
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from herald_pipeline.errors import ConfigError, did_you_mean

_FOLDER = Path(__file__).parent

MODELS = {
    "LLaDA2.0-mini": "llada2-mini",
    "SDAR-8B-Chat": "sdar-8b",
    "LLaDA-8B-Instruct": "llada-8b",
    "LLaDA-1.5": "llada-1.5",
    "Dream-v0-Base-7B": "dream-7b-base",
    "Dream-v0-Instruct-7B": "dream-7b-instruct",
}
"""The papers' model names and ours."""

METHODS = {
    "Dense": "dense",
    "InfiniGen": "infinigen",
    "MAGE-Offload": "mage-offload",
    "MAGE-Offload GPU selection": "mage-offload",
    "CPU selection, 32 queries": "mage-cpu",
    "+ representative query": "mage-cpu-representative",
    "+ draft lookahead (HERALD)": "herald",
    "HERALD": "herald",
}
"""The HERALD paper's method names (Table II, Fig. 13) and ours."""

CONTEXTS = {"16K": 16384, "32K": 32768}
"""The HERALD paper's contexts in tokens; the reading as powers of two is ours."""


class Paper(StrEnum):
    """The two sources."""

    HERALD = "HERALD"
    DSB = "DSB"


@dataclass(frozen=True, slots=True)
class Point:
    """One printed value and the setting that it belongs to; fields a source does not state are empty.

    ``model`` and ``method`` are the papers' words; ``budget`` is text such as ``5%``; ``value`` is text, because some
    values are words (``parity``, ``1/T``) and some points are only drawn (empty).
    """

    source: Paper
    exhibit: str
    metric: str
    unit: str
    value: str
    model: str = ""
    context: str = ""
    method: str = ""
    budget: str = ""
    batch: str = ""
    T: str = ""
    task: str = ""
    decoder: str = ""
    scheduler: str = ""
    cache: str = ""
    note: str = ""

    @property
    def number(self) -> float | None:
        """The value as a number; ``None`` where the source prints a word or nothing."""
        try:
            return float(self.value)
        except ValueError:
            return None

    @property
    def context_tokens(self) -> int | None:
        """Context in tokens, where one context is meant."""
        return CONTEXTS.get(self.context)

    @property
    def budget_share(self) -> float | None:
        """Budget as a share of the prefix."""
        return float(self.budget.removesuffix("%")) / 100 if self.budget.endswith("%") else None

    @property
    def steps(self) -> int | None:
        """T where it is fixed."""
        return int(self.T) if self.T.isdigit() else None

    @property
    def model_name(self) -> str | None:
        """Our name of the model."""
        return MODELS.get(self.model)

    @property
    def method_name(self) -> str | None:
        """Our name of the method."""
        return METHODS.get(self.method)


@cache
def points(paper: Paper = Paper.HERALD) -> tuple[Point, ...]:
    """Every printed value of a paper, in the order of the file."""
    return tuple(_read(_FOLDER / f"{paper.value.lower()}_published.csv"))


def _read(path: Path) -> Iterator[Point]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            source = Paper(row.pop("source"))
            yield Point(source=source, **row)


def find(paper: Paper = Paper.HERALD, **conditions: str | float) -> tuple[Point, ...]:
    """Points whose fields or properties equal all ``conditions``, as ``exhibit="Table II", method_name="herald"``."""
    known = {f.name for f in fields(Point)} | {name for name, kind in vars(Point).items() if isinstance(kind, property)}
    unknown = [name for name in conditions if name not in known]
    if unknown:
        raise ConfigError([f"published points have no field {name!r}{did_you_mean(name, known)}" for name in unknown])
    return tuple(
        point for point in points(paper) if all(getattr(point, name) == wanted for name, wanted in conditions.items())
    )


def number(paper: Paper = Paper.HERALD, **conditions: str | float) -> float:
    """The one printed number under these conditions.

    Raises
    ------
    ConfigError
        No point, several, or one without a number.
    """
    found = find(paper, **conditions)
    value = found[0].number if len(found) == 1 else None
    if value is None:
        listed = ", ".join(f"{name}={wanted}" for name, wanted in conditions.items())
        message = f"{paper} prints {len(found)} point(s) for {listed}; exactly one with a number is needed"
        raise ConfigError(message)
    return value


def exhibits(paper: Paper = Paper.HERALD) -> tuple[str, ...]:
    """Figures, tables and sections with printed values, in the order of the file."""
    return tuple(dict.fromkeys(point.exhibit for point in points(paper)))


class Verdict(StrEnum):
    """What came of testing a claim."""

    NOT_TESTED = "not tested"
    CONFIRMED = "confirmed"
    """Measured or counted here, and it holds."""
    CONTRADICTED = "contradicted"
    """Measured, counted or simulated here, and it does not hold; ``result`` says which."""
    REPRODUCED = "reproduced by fit"
    """Comes out of a model whose numbers were fitted to it or to its like."""
    PREDICTED = "predicted"
    """Comes out of a model that has not seen it."""
    NOT_TESTABLE = "not testable here"


@dataclass(frozen=True, slots=True)
class Claim:
    """One numeric sentence of a paper.

    Attributes
    ----------
    values
        The printed values, in the order of the sentence.
    test
        The command that tests it; empty where nothing here can.
    machine
        Where the test has to run: a profile, ``any``, or what is missing.
    result
        What the test gave, with its interval, once there is a verdict.
    reason
        Why it has not been tested, or cannot be.
    """

    id: str
    paper: Paper
    section: str
    claim: str
    values: tuple[float | str, ...]
    unit: str
    test: str
    machine: str
    verdict: Verdict
    result: str = ""
    reason: str = ""


@cache
def claims() -> tuple[Claim, ...]:
    """The ledger, in the papers' order."""
    data = tomllib.loads((_FOLDER / "claims.toml").read_text(encoding="utf-8"))
    return tuple(_claim(row) for row in data["claim"])


def _claim(row: Mapping[str, Any]) -> Claim:
    typed = {
        "paper": Paper(row["paper"]),
        "verdict": Verdict(row.get("verdict", Verdict.NOT_TESTED)),
        "values": tuple(row["values"]),
    }
    return Claim(**{**row, **typed})
