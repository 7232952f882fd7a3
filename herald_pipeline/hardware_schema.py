"""The border of a profile: one section's TOML table to its dataclass, checked by pydantic-core.

pydantic's own classes are left out: importing them would cost more than all the rest of a first result.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Any

from pydantic_core import SchemaValidator, ValidationError, core_schema

from herald_pipeline.errors import did_you_mean
from herald_pipeline.hardware import Curve, LinkKind, Number, Origin, Provenance, Quantity, Spec, specs

# What each provenance must say about itself.
_MUST_SAY = {
    Provenance.PUBLISHED: ("source",),
    Provenance.DATASHEET: ("source",),
    Provenance.MEASURED: ("command", "date"),
    Provenance.FITTED: ("pinned_by",),
    Provenance.COUNTED: ("source",),
    Provenance.ASSUMED: ("source",),
}


class _Table:
    """Validator of a TOML table: its keys, their types, no others."""

    def __init__(
        self, required: Mapping[str, core_schema.CoreSchema], optional: Mapping[str, core_schema.CoreSchema]
    ) -> None:
        self.keys = (*required, *optional)
        present = {key: core_schema.typed_dict_field(schema) for key, schema in required.items()}
        present |= {key: core_schema.typed_dict_field(schema, required=False) for key, schema in optional.items()}
        self._validator = SchemaValidator(core_schema.typed_dict_schema(present, extra_behavior="forbid"))

    def read(
        self, table: Mapping[str, Any], path: str, problems: list[str], others: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The table's values; an empty dict, and ``problems`` with all that is wrong, when it is refused."""
        try:
            values: dict[str, Any] = self._validator.validate_python(dict(table))
        except ValidationError as error:
            valid = (*self.keys, *others)
            problems += [_message(item, path, valid) for item in error.errors(include_url=False)]
            return {}
        return values


_TEXT = core_schema.str_schema(strip_whitespace=True, strict=True)
_FLOAT = core_schema.float_schema(allow_inf_nan=False)
_FLOATS = core_schema.list_schema(_FLOAT, min_length=2)
_ORIGIN: dict[str, core_schema.CoreSchema] = dict.fromkeys(
    ("source", "date", "command", "software", "pinned_by", "note"), _TEXT
)
_ORIGIN["spread"] = core_schema.float_schema(allow_inf_nan=False, ge=0)
_STATED: dict[str, core_schema.CoreSchema] = {
    "unit": _TEXT,
    "provenance": core_schema.literal_schema([provenance.value for provenance in _MUST_SAY]),
}
_NUMBER = _Table({"value": _FLOAT, **_STATED}, _ORIGIN)
_CURVE = _Table({"x": _FLOATS, "y": _FLOATS, "x_unit": _TEXT, **_STATED}, _ORIGIN)
_SAME_AS = _Table({"same_as": _TEXT}, {"note": _TEXT})


def _facts(cls: type[Any]) -> _Table:
    """Validator of a section's plain facts (names, counts); quantities are checked one by one."""
    schemas = {}
    for f in fields(cls):
        if "spec" not in f.metadata:
            default = "" if f.default is MISSING else f.default
            schemas[f.name] = _fact_schema(f.name, default)
    return _Table({}, schemas)


def _fact_schema(name: str, default: object) -> core_schema.CoreSchema:
    match default:
        case LinkKind():
            return core_schema.literal_schema([kind.value for kind in LinkKind])
        case bool():
            return core_schema.bool_schema(strict=True)
        case int():
            largest = {"generation": 6, "lanes": 16}.get(name)
            return core_schema.int_schema(ge=1, le=largest, strict=True)
        case _:
            return _TEXT


def section_from_table(
    cls: type[Any], table: object, path: str, problems: list[str], fitted: Collection[str] = ()
) -> Any:
    """Dataclass ``cls`` out of a TOML table; what is wrong is added to ``problems`` with its path.

    ``fitted`` are the full paths of the file's ``[fitted]`` table.
    """
    if not isinstance(table, Mapping):
        problems.append(f"{path} must be a table, got {table!r}")
        return cls()
    quantities = specs(cls)
    facts = {key: value for key, value in table.items() if key not in quantities}
    values = _facts(cls).read(facts, path, problems, others=quantities)
    if "kind" in values:
        values["kind"] = LinkKind(values["kind"])
    for key in quantities:
        if key in table:
            full = f"{path}.{key}"
            values[key] = _quantity(quantities[key], table[key], full, problems, in_fitted=full in fitted)
    return cls(**_resolve_same_as(cls, values, table, path, problems))


def _message(item: Any, path: str, valid: tuple[str, ...]) -> str:
    """Our words for one finding: path, value, rule, closest key."""
    location = ".".join(str(part) for part in item["loc"])
    full = f"{path}.{location}" if location else path
    if item["type"] == "extra_forbidden":
        return f"{full}: unknown key{did_you_mean(str(item['loc'][-1]), valid)}"
    if item["type"] == "missing":
        return f"{full} is missing"
    return f"{full}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _quantity(spec: Spec, table: object, path: str, problems: list[str], *, in_fitted: bool) -> Quantity | str | None:
    """The quantity that a table states, or the name of the field it repeats."""
    if not isinstance(table, Mapping):
        problems.append(
            f"{path} must be a table {{ value, unit = {spec.unit!r}, provenance, source }}, got {table!r}; "
            "every number says where it comes from"
        )
        return None
    if "same_as" in table:
        return str(_SAME_AS.read(table, path, problems, others={}).get("same_as", ""))
    content = {"provenance": "fitted", **table} if in_fitted else table
    is_curve = bool({"x", "y", "x_unit"}.intersection(content))
    found = (_CURVE if is_curve else _NUMBER).read(content, path, problems, others={})
    if not found:
        return None
    before = len(problems)
    problems += _origin_problems(found, in_fitted, path)
    if found["unit"] != spec.unit:
        problems.append(f"{path}.unit must be {spec.unit!r}, got {found['unit']!r}")
    if is_curve:
        problems += _curve_problems(found, path)
    if len(problems) > before:
        return None
    said = {key: found[key] for key in _ORIGIN if key in found}
    origin = Origin(Provenance(found["provenance"]), **said)
    if is_curve:
        return Curve(tuple(found["x"]), tuple(found["y"]), found["x_unit"], found["unit"], origin)
    return Number(found["value"], found["unit"], origin)


def _origin_problems(found: Mapping[str, Any], in_fitted: bool, path: str) -> list[str]:
    provenance = Provenance(found["provenance"])
    problems = [
        f"{path}.{key} is missing: a {provenance} number states it"
        for key in _MUST_SAY[provenance]
        if not found.get(key)
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
