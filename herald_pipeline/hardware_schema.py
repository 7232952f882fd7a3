"""The border of a profile: one section's TOML table to its dataclass, checked by pydantic.

Imported only when a profile is read, because pydantic costs more to import than all the rest.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from herald_pipeline.errors import did_you_mean
from herald_pipeline.hardware import Curve, LinkKind, Number, Origin, Provenance, Quantity, Spec, specs

_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)
_ORIGIN_KEYS = ("provenance", "source", "date", "command", "software", "spread", "pinned_by", "note")
# What each provenance must say about itself.
_MUST_SAY = {
    Provenance.PUBLISHED: ("source",),
    Provenance.DATASHEET: ("source",),
    Provenance.MEASURED: ("command", "date"),
    Provenance.FITTED: ("pinned_by",),
}


class _Origin(BaseModel):
    model_config = _STRICT
    provenance: Literal["published", "measured", "fitted", "datasheet"]
    source: str = ""
    date: str = ""
    command: str = ""
    software: str = ""
    spread: float | None = Field(default=None, ge=0)
    pinned_by: str = ""
    note: str = ""


class _NumberTable(_Origin):
    value: float
    unit: str


class _CurveTable(_Origin):
    x: tuple[float, ...] = Field(min_length=2)
    y: tuple[float, ...] = Field(min_length=2)
    x_unit: str
    unit: str


class _SameAsTable(BaseModel):
    model_config = _STRICT
    same_as: str
    note: str = ""


def _facts_model(cls: type[Any]) -> type[BaseModel]:
    """Pydantic model of a section's plain facts (names, counts); quantities are checked one by one."""
    shapes: dict[str, Any] = {}
    for f in fields(cls):
        if "spec" in f.metadata:
            continue
        default = f.default if f.default is not MISSING else ...
        kind = {int: int, bool: bool}.get(type(default), str)
        if f.type is LinkKind or isinstance(default, LinkKind):
            shapes[f.name] = (LinkKind, default)
        elif f.name == "generation":
            shapes[f.name] = (int, Field(default=default, ge=1, le=6))
        elif kind is int:
            shapes[f.name] = (int, Field(default=default, ge=1))
        else:
            shapes[f.name] = (kind, default)
    model: type[BaseModel] = create_model(f"{cls.__name__}Facts", __config__=_STRICT, **shapes)
    return model


def section_from_table(cls: type[Any], table: object, path: str, problems: list[str]) -> Any:
    """Dataclass ``cls`` out of a TOML table; what is wrong is added to ``problems`` with its path."""
    if not isinstance(table, Mapping):
        problems.append(f"{path} must be a table, got {table!r}")
        return cls()
    quantities = specs(cls)
    facts = {key: value for key, value in table.items() if key not in quantities}
    values = _validated(_facts_model(cls), facts, path, problems, others=quantities)
    for key in quantities:
        if key in table:
            values[key] = _quantity(quantities[key], table[key], f"{path}.{key}", problems)
    return cls(**_resolve_same_as(cls, values, table, path, problems))


def _validated(
    model: type[BaseModel], table: Mapping[str, Any], path: str, problems: list[str], others: Mapping[str, Any]
) -> dict[str, Any]:
    """The table's values as ``model`` reads them; an empty dict when it refuses them."""
    try:
        return model.model_validate(dict(table)).model_dump()
    except ValidationError as error:
        valid = (*model.model_fields, *others)
        problems += [_message(item, path, valid) for item in error.errors()]
        return {}


def _message(item: Any, path: str, valid: tuple[str, ...]) -> str:
    """Our words for one of pydantic's findings: path, value, rule, closest key."""
    location = ".".join(str(part) for part in item["loc"])
    full = f"{path}.{location}" if location else path
    if item["type"] == "extra_forbidden":
        return f"{full}: unknown key{did_you_mean(str(item['loc'][-1]), valid)}"
    if item["type"] == "missing":
        return f"{full} is missing"
    return f"{full}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _quantity(spec: Spec, table: object, path: str, problems: list[str]) -> Quantity | str | None:
    """The quantity that a table states, or the name of the field it repeats."""
    if not isinstance(table, Mapping):
        problems.append(
            f"{path} must be a table {{ value, unit = {spec.unit!r}, provenance, source }}, got {table!r}; "
            "every number says where it comes from"
        )
        return None
    if "same_as" in table:
        return str(_validated(_SameAsTable, table, path, problems, others={}).get("same_as", ""))
    content = {key: value for key, value in table.items() if key != "_fitted"}
    is_curve = bool({"x", "y", "x_unit"}.intersection(content))
    found = _validated(_CurveTable if is_curve else _NumberTable, content, path, problems, others={})
    if not found:
        return None
    before = len(problems)
    problems += _origin_problems(found, "_fitted" in table, path)
    if found["unit"] != spec.unit:
        problems.append(f"{path}.unit must be {spec.unit!r}, got {found['unit']!r}")
    if is_curve:
        problems += _curve_problems(found, path)
    if len(problems) > before:
        return None
    origin = Origin(**{key: found[key] for key in _ORIGIN_KEYS} | {"provenance": Provenance(found["provenance"])})
    if is_curve:
        return Curve(found["x"], found["y"], found["x_unit"], found["unit"], origin)
    return Number(found["value"], found["unit"], origin)


def _origin_problems(found: Mapping[str, Any], in_fitted: bool, path: str) -> list[str]:
    provenance = Provenance(found["provenance"])
    problems = [
        f"{path}.{key} is missing: a {provenance} number states it" for key in _MUST_SAY[provenance] if not found[key]
    ]
    if (provenance is Provenance.FITTED) != in_fitted:
        problems.append(f"{path}: fitted numbers, and only they, stand in the [fitted] table under their full path")
    return problems


def _curve_problems(found: Mapping[str, Any], path: str) -> list[str]:
    x, y = found["x"], found["y"]
    problems = []
    if len(x) != len(y):
        problems.append(f"{path}: x has {len(x)} values and y has {len(y)}; they must pair up")
    if x[0] <= 0 or any(right <= left for left, right in pairwise(x)):
        problems.append(f"{path}.x must be positive and ascending, got {list(x)!r}")
    return problems


def _resolve_same_as(
    cls: type[Any], values: dict[str, Any], table: Mapping[str, Any], path: str, problems: list[str]
) -> dict[str, Any]:
    """``values`` with every name of another field replaced by that field's quantity, marked as such."""
    resolved = dict(values)
    for key, value in values.items():
        if not isinstance(value, str) or not isinstance(table.get(key), Mapping):
            continue
        other = values.get(value)
        if not isinstance(other, Number | Curve):
            quantities = [k for k, v in values.items() if isinstance(v, Number | Curve)]
            problems.append(f"{path}.{key}.same_as: no quantity {value!r} here{did_you_mean(value, quantities)}")
            resolved[key] = None
            continue
        if other.unit != specs(cls)[key].unit:
            problems.append(f"{path}.{key}.same_as: {value} is in {other.unit}, not in {specs(cls)[key].unit}")
        origin = Origin(
            provenance=other.origin.provenance,
            source=other.origin.source,
            note=str(table[key].get("note", "")),
            same_as=value,
        )
        if isinstance(other, Curve):
            resolved[key] = Curve(other.x, other.y, other.x_unit, other.unit, origin)
        else:
            resolved[key] = Number(other.value, other.unit, origin)
    return resolved
