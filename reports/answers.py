"""What the shipped model wrote: the same questions answered by several methods, right or wrong.

The file is that of ``python -m herald_exec.reference answers --out FILE``.
"""

from pathlib import Path
from typing import Any

from reports.files import read_object
from reports.page import Cell, Section, Table

_LONGEST = 160
"""Characters of an answer that a table shows."""


def section(path: Path) -> Section:
    """A table of questions with every method's answer, and how many are right.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds something else.
    """
    found = read(path)
    methods = list(found["methods"])
    header = ("task", "question", "has to contain", *methods)
    rows = [
        (
            Cell(row["task"]),
            Cell(_short(row["question"])),
            Cell(_short("; ".join(row["wanted"]))),
            *(_answer(row["answers"][method]) for method in methods),
        )
        for row in found["rows"]
    ]
    budget = "each method's own budget" if found.get("budget") is None else f"a budget of {found['budget']:.0%}"
    text = (
        f"{found['model']} ships with the package. Each question stands behind {found['context']:,} tokens of text "
        f"that it was not trained on and asks for something in it; methods other than dense select with {budget}. "
        + " ".join(_total(method, total) for method, total in found["methods"].items())
    )
    note = (
        "A handful of samples: the intervals say how little they tell. Wordings are free, what they must hold is not."
    )
    return Section("What the model wrote", (text,), table=Table(header, rows), notes=(note,))


def read(path: Path) -> dict[str, Any]:
    """The document of ``answers``."""
    how = f"make it: python -m herald_exec.reference answers --out {path}"
    return read_object(path, how, ("model", "context", "rows", "methods"))


def _answer(answer: dict[str, Any]) -> Cell:
    return Cell(_short(answer["text"]), "good" if answer["right"] else "bad")


def _total(method: str, total: dict[str, Any]) -> str:
    low, high = total["accuracy"]["low"], total["accuracy"]["high"]
    return (
        f"{method}: {total['right']} of {total['of']} right (95%: {low:.2f} to {high:.2f}), "
        f"{total['tokens_per_forward']:.1f} tokens a forward."
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
