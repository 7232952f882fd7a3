"""The profile file that a measurement writes: quantities with provenance, and raw tables beside it."""

import csv
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from calibration.bench import Part, Row, Value
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError, read_failure

ENGINE = "herald-exec"


@dataclass(frozen=True, slots=True)
class Stamp:
    """How, when and with what the numbers of one measurement were obtained."""

    command: str
    date: str
    software: str


def raw_folder(profile: Path) -> Path:
    """Folder of the raw tables that belong to a profile file."""
    return profile.with_suffix("").with_name(f"{profile.stem}.raw")


def merge(base: Mapping[str, Any], parts: Iterable[Part], stamp: Stamp) -> dict[str, Any]:
    """``base`` (a profile file's content) with every quantity of ``parts`` put at its path."""
    data = _deep(base)
    data.setdefault("engines", {}).setdefault(ENGINE, {})
    for part in parts:
        for value in part.values:
            root, _, rest = value.path.partition(".")
            if root == "engine":
                table, key = data["engines"][ENGINE], rest
            else:
                section, _, key = rest.partition(".")
                table = data.setdefault(root, {}).setdefault(section, {})
            table[key] = quantity_table(value, stamp)
    return data


def quantity_table(value: Value, stamp: Stamp) -> dict[str, Any]:
    """A quantity as the file states it."""
    table: dict[str, Any] = {}
    if value.x:
        assert isinstance(value.y, tuple)
        table["x"], table["y"] = list(value.x), [_digits(y) for y in value.y]
        table["x_unit"], table["unit"] = value.x_unit, value.unit
    else:
        assert isinstance(value.y, float | int)
        table["value"], table["unit"] = _digits(value.y), value.unit
    if value.datasheet:
        return {**table, "provenance": "datasheet", "source": value.datasheet}
    table |= {"provenance": "measured", "command": stamp.command, "date": stamp.date, "software": stamp.software}
    if value.spread is not None:
        table["spread"] = value.spread
    if value.note:
        table["note"] = value.note
    return table


def _digits(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.5g}")


def _deep(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def read(path: Path) -> dict[str, Any]:
    """Content of an earlier profile file.

    Raises
    ------
    ConfigError
        It is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a readable TOML profile: {read_failure(error)}") from None


def template() -> dict[str, Any]:
    """The shipped frame of a profile for a machine without a GPU."""
    return read(hardware_io.profile_dir() / f"cpu-only{hardware_io.TEMPLATE_SUFFIX}.toml")


def write(path: Path, data: Mapping[str, Any], header: Sequence[str]) -> None:
    """Write a profile file, the comment lines of ``header`` first; refused when it would not read back."""
    partial = path.with_name(f"{path.name}.partial")
    write_unchecked(partial, data, header)
    try:
        hardware_io.resolve(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_unchecked(path: Path, data: Mapping[str, Any], header: Sequence[str]) -> None:
    """Write a profile file that need not be whole yet."""
    text = "".join(f"# {line}\n" for line in header) + tomli_w.dumps(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_raw(folder: Path, part: Part) -> None:
    """Write a part's raw table as ``<folder>/<part>.csv``."""
    if part.rows:
        write_csv(folder / f"{part.name}.csv", part.rows)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write lines as CSV; columns in the order in which they first occur."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
