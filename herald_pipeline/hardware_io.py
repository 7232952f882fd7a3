"""Profiles from TOML: read, checked with all problems at once, overridden, resolved by name or path.

The schema is derived from the dataclasses of :mod:`herald_pipeline.hardware`. A file states quantities as tables
(``{ value = 3350, unit = "GB/s", provenance = "published", source = "..." }``, or ``x`` and ``y`` for a curve, or
``{ same_as = "h2d_gb_s" }``); all fitted ones stand together in its ``[fitted]`` table, under their full paths.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from herald_pipeline.errors import ConfigError, ProfileError, check_number, did_you_mean, read_failure, unknown_name
from herald_pipeline.hardware import (
    DESCRIPTIVE,
    SECTIONS,
    Cpu,
    Dram,
    Engine,
    Gpu,
    Link,
    Machine,
    Number,
    Origin,
    Profile,
    Provenance,
)
from herald_pipeline.hardware_ranges import check_ranges

_SECTION_TYPES: dict[str, type[Any]] = {"gpu": Gpu, "cpu": Cpu, "dram": Dram, "link": Link}
_TOP_KEYS = ("name", "title", "engine", "notes", "machine", "engines", "fitted")
SUFFIX = ".toml"
TEMPLATE_SUFFIX = ".template"


def profile_dir() -> Path:
    """Folder of the profiles that ship: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "hw_profiles"
    return inside if inside.is_dir() else package.parent / "hw_profiles"


def names() -> tuple[str, ...]:
    """Names of the profiles that ship, templates left out."""
    stems = sorted(path.name.removesuffix(SUFFIX) for path in profile_dir().glob(f"*{SUFFIX}"))
    return tuple(stem for stem in stems if not stem.endswith(TEMPLATE_SUFFIX))


def complete_names(needs: Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the shipped profiles that state all that ``needs`` ask for."""
    wanted = tuple(needs)
    return tuple(name for name in names() if not resolve(name).missing(wanted))


def resolve(name_or_path: str | Path, engine: str | None = None, overrides: Sequence[str] = ()) -> Profile:
    """Profile with this name or at this path.

    Parameters
    ----------
    engine : str, optional
        One that the file states (default: the one it names), or ``PROFILE:ENGINE`` to take another machine's engine
        on purpose; an engine is never inherited silently.
    overrides : sequence of str
        ``machine.link.h2d_gb_s=25`` texts of ``--set``; ``engine.`` stands for the engine in use.

    Raises
    ------
    ConfigError
        Unknown name or key, a value that cannot be; every problem of the file in one error.
    ProfileError
        The engine is not stated for this machine.
    """
    path = find(name_or_path)
    data = _read(path)
    if engine is not None and ":" in engine:
        data = _borrow(data, engine)
    where = f"profile {path.stem}" if path.parent == profile_dir() else str(path)
    return _parse(data, where, engine, overrides)


def find(name_or_path: str | Path) -> Path:
    """File of the profile with this name or at this path.

    Raises
    ------
    ConfigError
        There is none.
    """
    text = str(name_or_path)
    shipped = profile_dir() / f"{text}{SUFFIX}"
    if "/" not in text and shipped.is_file():
        return shipped
    path = Path(text)
    if path.is_file():
        return path
    if "/" in text or text.endswith(SUFFIX):
        message = f"no profile file at {text}; pass a TOML profile or one of {', '.join(names())}"
        raise ConfigError(message)
    raise unknown_name(kind="hardware", name=text, valid=names())


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        message = f"{path} is not a readable TOML profile: {read_failure(error)}"
        raise ConfigError(message) from None


def _borrow(data: dict[str, Any], engine: str) -> dict[str, Any]:
    """``data`` with another profile's engine added under ``PROFILE:ENGINE``, its fitted numbers included."""
    other_name, _, engine_name = engine.rpartition(":")
    other = _read(find(other_name))
    if engine_name not in other.get("engines", {}):
        raise unknown_name(kind=f"engine of {other_name}", name=engine_name, valid=other.get("engines", {}))
    prefix = f"engines.{engine_name}."
    fitted = {
        f"engines.{engine}.{path.removeprefix(prefix)}": table
        for path, table in other.get("fitted", {}).items()
        if path.startswith(prefix)
    }
    return data | {
        "engines": {**data.get("engines", {}), engine: other["engines"][engine_name]},
        "fitted": {**data.get("fitted", {}), **fitted},
    }


def _top_problems(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with the file's top level."""
    problems = [f"{key}: unknown key{did_you_mean(key, _TOP_KEYS)}" for key in data if key not in _TOP_KEYS]
    problems += [
        f"{key} must be a table, got {data[key]!r}"
        for key in ("machine", "engines", "fitted")
        if not isinstance(data.get(key, {}), Mapping)
    ]
    problems += [
        f"{key} must be text, got {data[key]!r}"
        for key in ("name", "title", "engine")
        if not isinstance(data.get(key, ""), str)
    ]
    notes = data.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        problems.append(f"notes must be a list of texts, got {notes!r}")
    return problems


def _merge_fitted(data: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """Tables of machine and engines with each quantity of ``[fitted]`` put at the path it names."""
    merged = {
        root: {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.get(root, {}).items()}
        for root in ("machine", "engines")
    }
    for path, table in data.get("fitted", {}).items():
        root, _, rest = path.partition(".")
        section, _, name = rest.rpartition(".")
        if root not in merged or not isinstance(merged[root].get(section), dict):
            problems.append(
                f"fitted: {path!r} names no section of this file; write machine.<section>.<key> or engines.<name>.<key>"
            )
        elif name in merged[root][section]:
            problems.append(f"fitted: {path!r} is stated twice, here and in [{root}.{section}]")
        else:
            merged[root][section][name] = table
    return merged


def _parse(data: Mapping[str, Any], where: str, engine: str | None, overrides: Sequence[str]) -> Profile:
    """Profile out of a file's content; every problem is collected before any is raised."""
    # Brings pydantic-core: only where a file is read.
    from herald_pipeline.hardware_schema import section_from_table

    problems = _top_problems(data)
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    fitted = data.get("fitted", {})
    merged = _merge_fitted(data, problems)
    tables = merged["machine"]
    problems += [
        f"machine.{key}: unknown section{did_you_mean(key, SECTIONS)}" for key in tables if key not in SECTIONS
    ]
    sections = {
        name: section_from_table(_SECTION_TYPES[name], tables.get(name, {}), f"machine.{name}", problems, fitted)
        for name in SECTIONS
    }
    engines = {
        name: section_from_table(Engine, table, f"engines.{name}", problems, fitted)
        for name, table in merged["engines"].items()
    }
    if problems:
        raise ConfigError([f"{where}: {problem}" for problem in problems])
    machine = Machine(name=str(data.get("name", "unnamed")), **sections)
    engines = {name: replace(value, name=name) for name, value in engines.items()}
    chosen = engine or data.get("engine") or (next(iter(engines)) if len(engines) == 1 else None)
    if chosen is None or chosen not in engines:
        raise _no_engine(machine.name, chosen, engines)
    profile = Profile(
        name=machine.name,
        title=str(data.get("title", "")),
        notes=tuple(data.get("notes", ())),
        machine=machine,
        engine=engines[chosen],
        engines=tuple(engines),
        source=where,
    )
    profile = _override(profile, overrides)
    warnings = check_ranges(profile, where)
    return replace(profile, warnings=tuple(warnings))


def _no_engine(machine: str, engine: str | None, engines: Mapping[str, Engine]) -> ProfileError:
    stated = ", ".join(engines) or "none"
    if engine is None and not engines:
        return ProfileError(
            f"profile {machine!r} names no default engine and states none: it needs a table [engines.NAME]; see "
            f"{names()[0]}"
        )
    if engine is None:
        return ProfileError(f"profile {machine!r} names no default engine; pass --engine with one of: {stated}")
    elsewhere = [name for name in names() if name != machine and engine in _read(find(name)).get("engines", {})]
    others = [f"{name}:{engine}" for name in elsewhere]
    hint = f"; to take another machine's on purpose: --engine {' or '.join(others)}" if others else ""
    return ProfileError(
        f"engine {engine!r} is not stated for machine {machine!r} (stated: {stated}); an engine's overheads are never "
        f"taken from another machine silently: `python -m calibration measure` writes them{hint}"
    )


def _override(profile: Profile, overrides: Sequence[str]) -> Profile:
    """``profile`` with each ``path=value`` put in place; quantities are marked as assumed."""
    problems: list[str] = []
    units = {
        path.replace(f"engines.{profile.engine.name}", "engine"): spec.unit for path, spec, _ in profile.quantities()
    }
    counts = _count_paths(profile.machine)
    for text in overrides:
        path, separator, raw = (part.strip() for part in text.partition("="))
        if not separator:
            problems.append(f"--set {text}: write path=value, for example machine.link.h2d_gb_s=25")
        elif path in DESCRIPTIVE:
            problems.append(f"--set {path}: would change nothing, it describes the machine: {DESCRIPTIVE[path]}")
        elif path not in units and path not in counts:
            listed = "write machine.SECTION.NAME or engine.NAME; `herald-sim hardware NAME` lists them"
            problems.append(f"--set {path}: unknown path{did_you_mean(path, (*units, *counts), otherwise=listed)}")
        else:
            try:
                value = float(raw)
            except ValueError:
                problems.append(f"--set {path}: must be a number{_in_unit(units.get(path))}, got {raw!r}")
                continue
            if path in counts:
                problem = check_number(value, f"--set {path}", minimum=1, maximum=counts[path], integer=True)
                if problem:
                    problems.append(problem)
                    continue
                profile = _put(profile, path, int(value))
            else:
                profile = _put(profile, path, Number(value, units[path], Origin(Provenance.ASSUMED, source="--set")))
    if problems:
        raise ConfigError(problems)
    return replace(profile, overrides=tuple(overrides))


def _in_unit(unit: str | None) -> str:
    return "" if unit is None else f" in {unit}"


def _count_paths(machine: Machine) -> dict[str, float | None]:
    """Paths of the machine's whole-number facts, each with the largest value allowed."""
    largest = {"generation": 6.0, "lanes": 16.0}
    return {
        f"machine.{section}.{f.name}": largest.get(f.name)
        for section in SECTIONS
        for f in fields(type(getattr(machine, section)))
        if type(getattr(getattr(machine, section), f.name)) is int
    }


def _put(profile: Profile, path: str, value: Any) -> Profile:
    root, _, rest = path.partition(".")
    if root == "engine":
        return replace(profile, engine=replace(profile.engine, **{rest: value}))
    section, _, name = rest.partition(".")
    part = replace(getattr(profile.machine, section), **{name: value})
    return replace(profile, machine=replace(profile.machine, **{section: part}))
