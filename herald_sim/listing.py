"""What there is: models, methods and machines, with where each fact comes from and what goes with what."""

from collections import Counter
from typing import Any

from herald_pipeline import catalogue, hardware_io, methods, published
from herald_pipeline import pipeline as pipelines
from herald_pipeline.errors import ProfileError, unknown_name
from herald_pipeline.hardware import Curve, Profile, Provenance
from herald_pipeline.model import Attention
from herald_sim.cost import needs
from herald_sim.text import number, table, wrapped

_OFTEN = 3
"""Numbers of a profile that rest on one command, from which on it is said once."""
_MODEL_FOR_NEEDS = "llada2-mini"
"""A mixture of experts: its ops include those of models without."""
_MODEL_WITHOUT_EXPERTS = "sdar-8b"


def model_rows() -> list[dict[str, Any]]:
    """Every model with its shape, its sources, and the facts that nobody has confirmed."""
    rows = []
    for name in catalogue.names():
        shape = catalogue.get(name)
        unconfirmed = [fact for fact, source in shape.sources.items() if catalogue.is_unconfirmed(source)]
        rows.append(
            {
                "name": name,
                "architecture": shape.architecture,
                "attention": shape.attention.value,
                "layers": shape.num_layers,
                "hidden": shape.hidden_size,
                "heads": shape.num_heads,
                "kv_heads": shape.num_kv_heads,
                "parameters": shape.num_params,
                "active_parameters": shape.active_params,
                "kv_bytes_per_token": shape.kv_bytes_per_token(),
                "max_positions": shape.max_positions,
                "methods": _methods_for(shape.attention),
                "sources": dict(shape.sources),
                "unconfirmed": unconfirmed,
            }
        )
    return rows


def _methods_for(attention: Attention) -> str:
    return "all" if attention is Attention.BLOCK_CAUSAL else "dense + cache"


def _size(value: float) -> str:
    """Two decimals, or two digits of what is less than one: no model has 0.00 parameters."""
    return f"{value:.2f}".removesuffix(".00") if value >= 1 else f"{value:.2g}"


def models_text(rows: list[dict[str, Any]]) -> str:
    """A line a model; ``*`` marks models with unconfirmed facts, which follow."""
    cells = [
        (
            row["name"] + ("*" if row["unconfirmed"] else ""),
            row["architecture"],
            str(row["layers"]),
            f"{row['heads']}/{row['kv_heads']}",
            _size(row["parameters"] / 1e9),
            _size(row["kv_bytes_per_token"] / 1024),
            str(row["max_positions"]),
            row["methods"],
        )
        for row in rows
    ]
    header = ("model", "architecture", "layers", "heads/kv", "B params", "KiB/tok", "positions", "methods")
    notes = [f"* {row['name']}: {fact}: {row['sources'][fact]}" for row in rows for fact in row["unconfirmed"]]
    return "\n".join([table(header, cells), *(wrapped(note) for note in notes)])


def method_rows() -> list[dict[str, Any]]:
    """Every method with its axes, default budget and assumptions."""
    rows = []
    for name in methods.names():
        method = methods.get(name)
        axes = {axis: getattr(method.axes, axis) for axis in type(method.axes).__slots__}
        rows.append(
            {
                "name": name,
                "summary": method.summary,
                "axes": axes,
                "budget": method.defaults.budget,
                "queries": method.defaults.queries,
                "assumptions": list(method.assumptions),
                "simulated_only": method.simulated_only,
            }
        )
    return rows


def methods_text(rows: list[dict[str, Any]]) -> str:
    """A paragraph a method: what it does and its six choices."""
    parts = []
    for row in rows:
        only = ", simulated only" if row["simulated_only"] else ""
        lines = [f"{row['name']} (budget {row['budget']:g}{only}): {row['summary']}"]
        lines += [f"  {axis:<10}{choice}" for axis, choice in row["axes"].items()]
        parts.append("\n".join(wrapped(line) for line in lines))
    return "\n\n".join(parts)


def hardware_rows(only: str | None = None) -> list[dict[str, Any]]:
    """Every profile, or the one named: engines, each number and what it rests on, the methods that it can price."""
    wanted, without = (
        {name: needs(pipelines.build(catalogue.get(model), name)) for name in methods.names()}
        for model in (_MODEL_FOR_NEEDS, _MODEL_WITHOUT_EXPERTS)
    )
    rows = []
    for wanted_name in hardware_io.names() if only is None else (only,):
        profile = hardware_io.resolve(wanted_name)
        counts: dict[str, int] = {}
        for _, _, quantity in profile.quantities():
            if quantity is not None:
                # A number that repeats a neighbour is not one more of its kind.
                kind = "repeated" if quantity.origin.same_as else str(quantity.origin.provenance)
                counts[kind] = counts.get(kind, 0) + 1
        lacking: dict[str, list[str]] = {}
        for method, required in wanted.items():
            try:
                profile.check_complete(required)
            except ProfileError:
                lacking[method] = [path for path, _ in profile.missing(required)]
        rows.append(
            {
                "name": profile.name,
                "title": profile.title,
                "engines": list(profile.engines),
                "engine": profile.engine.name,
                "provenance": counts,
                "quantities": quantity_rows(profile),
                "notes": list(profile.notes),
                "methods": [method for method in wanted if method not in lacking],
                "methods_without_experts": [
                    name for name, required in without.items() if not profile.missing(required)
                ],
                "lacking": lacking,
            }
        )
    return rows


def quantity_rows(profile: Profile) -> list[dict[str, Any]]:
    """Every number that a profile states: value or curve, unit, provenance, spread, and what it rests on."""
    rows = []
    for path, _, quantity in profile.quantities():
        if quantity is None:
            continue
        origin = quantity.origin
        rests_on = f"repeats {origin.same_as}: {origin.note}" if origin.same_as else origin.pinned_by or origin.source
        if origin.provenance is Provenance.MEASURED and not origin.same_as:
            rests_on = " ".join(text for text in (origin.command, origin.date, origin.source) if text)
        rows.append(
            {
                "name": path,
                "value": list(quantity.values) if isinstance(quantity, Curve) else quantity.peak,
                **({"x": list(quantity.x), "x_unit": quantity.x_unit} if isinstance(quantity, Curve) else {}),
                "unit": quantity.unit,
                "provenance": "repeated" if origin.same_as else str(origin.provenance),
                "spread": origin.spread,
                "rests_on": rests_on,
            }
        )
    return rows


def quantities_text(row: dict[str, Any]) -> str:
    """One profile in full: a paragraph about it, then each number and what it rests on."""
    counts = Counter(one["rests_on"] for one in row["quantities"] if one["provenance"] == Provenance.MEASURED)
    most, times = counts.most_common(1)[0] if counts else ("", 0)
    if times < _OFTEN:
        most = ""
    lines = [hardware_text([row]), ""]
    if most:
        lines += [wrapped(f"measured, where nothing stands below: {most}", hang=4), ""]
    for one in row["quantities"]:
        value = one["value"]
        shown = f"{number(min(value))} to {number(max(value))}" if isinstance(value, list) else number(value)
        spread = "" if one["spread"] is None else f" +- {100 * one['spread']:.0f}%"
        lines.append(f"{one['name']} = {shown} {one['unit']}{spread}, {one['provenance']}")
        if one["rests_on"] and one["rests_on"] != most:
            lines.append(wrapped(f"    {one['rests_on']}", hang=4))
    return "\n".join(lines)


def hardware_text(rows: list[dict[str, Any]]) -> str:
    """A paragraph a profile."""
    parts = []
    for row in rows:
        counts = ", ".join(f"{count} {kind}" for kind, count in row["provenance"].items())
        lines = [
            f"{row['name']}: {row['title']}",
            f"  engines  {', '.join(row['engines'])} (default {row['engine']})",
            f"  numbers  {counts}",
            f"  methods  {', '.join(row['methods']) or 'none'}",
        ]
        if row["methods_without_experts"] != row["methods"]:
            lines[-1] += f" (of models without experts: {', '.join(row['methods_without_experts']) or 'none'})"
        lacking: dict[str, list[str]] = {}
        for method, paths in row["lacking"].items():
            lacking.setdefault(", ".join(paths), []).append(method)
        every = "every method" + (" of a mixture of experts" if row["methods_without_experts"] else "")
        for paths, names in lacking.items():
            lines.append(f"  lacks    {paths} for {', '.join(names) if row['methods'] else every}")
        lines += [f"  note     {note}" for note in row["notes"]]
        parts.append("\n".join(wrapped(line, hang=11) for line in lines))
    return "\n\n".join(parts)


def claim_rows(verdict: str | None = None) -> list[dict[str, Any]]:
    """The ledger of claims, or those with one verdict."""
    known = [str(one) for one in published.Verdict]
    if verdict is not None and verdict not in known:
        raise unknown_name("verdict", verdict, known)
    rows = []
    for claim in published.claims():
        if verdict is None or claim.verdict == verdict:
            row = {name: getattr(claim, name) for name in type(claim).__slots__}
            rows.append({**row, "paper": str(claim.paper), "verdict": str(claim.verdict), "values": list(claim.values)})
    return rows


def claims_text(rows: list[dict[str, Any]]) -> str:
    """A paragraph a claim, then how many have each verdict."""
    parts = []
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
        values = ", ".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in row["values"])
        lines = [
            f"{row['id']} ({row['paper']}, {row['section']}): {row['verdict']}",
            f"  {row['claim']} [{values} {row['unit']}]",
        ]
        lines += [f"  {name:<8}{row[name]}" for name in ("test", "machine", "result", "reason") if row[name]]
        parts.append("\n".join(wrapped(line, hang=10) for line in lines))
    return "\n\n".join([*parts, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())])
