"""One page: sections of words, a chart, a table; the vega bundle once, N specifications; no address outside it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from herald_pipeline.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table; ``kind`` is ``number``, ``number good``, ``number bad`` or nothing."""

    text: str
    kind: str = ""

    @property
    def value(self) -> str:
        """The text without its interval."""
        return self.text[: len(self.text) - len(self.interval)].rstrip()

    @property
    def interval(self) -> str:
        """What stands in brackets behind a number, which the page sets below it."""
        place = self.text.find(" (") if self.kind.startswith("number") and self.text.endswith(")") else -1
        return self.text[place + 1 :] if place > 0 else ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def is_number(self, column: int) -> bool:
        """Whether a column holds numbers, above which its heading then stands."""
        cells = [row[column] for row in self.rows if column < len(row) and row[column].text]
        return bool(cells) and all(cell.kind.startswith("number") for cell in cells)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. ``chart`` is an altair chart, ``caption`` says what to see in it."""

    title: str
    texts: Sequence[str] = ()
    chart: Any = None
    caption: str = ""
    table: Table | None = None
    notes: Sequence[str] = field(default_factory=tuple)


def render(title: str, lead: str, sections: Sequence[Section], top: Markup = Markup("")) -> str:  # noqa: B008
    """The page as HTML text; ``top`` is markup between lead and sections."""
    specs = {f"chart-{i}": section.chart.to_dict() for i, section in enumerate(sections) if section.chart is not None}
    shown = [
        {
            "title": section.title,
            "texts": section.texts,
            "chart": f"chart-{i}" if section.chart is not None else "",
            "alt": specs.get(f"chart-{i}", {}).get("description", ""),
            "caption": section.caption,
            "table": section.table,
            "notes": section.notes,
        }
        for i, section in enumerate(sections)
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        title=title, lead=lead, top=top, sections=shown, bundle=Markup(_bundle()), specs=Markup(_script_json(specs))
    )


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, about 0.9 MB."""
    text: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return text.replace("</script", "<\\/script")


def _script_json(value: object) -> str:
    """JSON that may stand in a script element.

    Raises
    ------
    ConfigError
        A NaN or an infinity, which JSON does not have.
    """
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError as problem:
        raise ConfigError(f"a chart holds a number that JSON cannot carry: {problem}") from None
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def png(chart: Any, scale: float = 2.0) -> bytes:
    """The chart as PNG, without a browser."""
    data: bytes = vl_convert.vegalite_to_png(chart.to_dict(), scale=scale)
    return data
