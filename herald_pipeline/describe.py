"""The description itself, for people and programs: text, JSON, SVG of a method's streams, edges and pools."""

from collections.abc import Iterator
from html import escape
from typing import Any

from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import RequestSize
from herald_pipeline.stages import Section, Stage
from herald_pipeline.units import format_bytes

_COLUMN, _ROW, _LEFT, _TOP = 168, 64, 110, 40
_COLOURS = {"gpu": "#4c78a8", "cpu": "#f58518", "h2d": "#54a24b", "d2h": "#72b7b2"}


def to_dict(pipeline: Pipeline, tokens: int) -> dict[str, Any]:
    """Streams, stages in order of issue, edges and pools with bytes per request of ``tokens`` positions."""
    settings, template = pipeline.settings, pipeline.template
    size = request_size(pipeline, tokens)
    axes = pipeline.method.axes
    return {
        "method": pipeline.method.name,
        "summary": pipeline.method.summary,
        "model": pipeline.model.name,
        "axes": {name: getattr(axes, name) for name in type(axes).__slots__},
        "settings": {name: getattr(settings, name) for name in type(settings).__slots__},
        "draft_step": template.draft_step,
        "lookahead": template.lookahead,
        "streams": [
            {
                "name": stream.name,
                "high_priority": stream.high_priority,
                "stages": [stage.name for _, stage in ordered(pipeline) if stage.stream == stream.name],
            }
            for stream in template.streams
        ],
        "stages": [
            {
                "name": stage.name,
                "when": when,
                "stream": stage.stream,
                "resource": stage.resource,
                "layers": list(stage.layers),
                "rows": stage.rows.value,
                "reads": [_access(access) for access in stage.reads],
                "writes": [_access(access) for access in (*stage.writes, *stage.drafts, *stage.completes)],
            }
            for when, stage in ordered(pipeline)
        ],
        "edges": [{"edge": str(edge), "why": edge.why} for edge in template.edges],
        "pools": [
            {
                "name": pool.name,
                "home": pool.home.value,
                "buffers": pool.buffers,
                "pinned": pool.pinned,
                "bytes_per_request": pool.buffers * pool.bytes_per_request(size),
                "purpose": pool.purpose,
            }
            for pool in pipeline.pools
        ],
        "assumptions": list(pipeline.method.assumptions),
    }


def request_size(pipeline: Pipeline, tokens: int) -> RequestSize:
    """What a request of ``tokens`` positions selects and how long its blocks are."""
    settings = pipeline.settings
    return RequestSize(tokens, settings.selected_tokens(tokens), settings.block_length)


def ordered(pipeline: Pipeline) -> Iterator[tuple[str, Stage]]:
    """When (``prefill``, ``block begins``, ``every step``, ``after step i``, ``block ends``) and stage, in order."""
    template = pipeline.template

    def of(when: str, sections: tuple[Section, ...]) -> Iterator[tuple[str, Stage]]:
        for section in sections:
            for stage in section.stages:
                yield when, stage

    yield from of("prefill", template.prefill)
    yield from of("block begins", template.head)
    yield from of("every step", template.step)
    yield "every step", template.denoise
    for step in sorted(template.after_step):
        yield from of(f"after step {step}", template.after_step[step])
    yield from of("block ends", template.tail)


def to_text(pipeline: Pipeline, tokens: int) -> str:
    """The description as a page of plain text."""
    described = to_dict(pipeline, tokens)
    lines = [f"{described['method']} on {described['model']}: {described['summary']}", ""]
    lines += [f"  {name:<10} {value}" for name, value in described["axes"].items()]
    lines += ["", "stages, in order of issue"]
    for when, stage in ordered(pipeline):
        layers = f" x {len(stage.layers)} layers" if stage.layers else ""
        lines.append(
            f"  {when:<14} {stage.stream:<10} {stage.name}{layers} ({stage.resource}, {stage.rows.value} rows)"
        )
    lines += ["", "edges between streams (all other work overlaps)"]
    lines += [f"  {edge['edge']}: {edge['why']}" for edge in described["edges"]] or ["  none"]
    lines += ["", f"pools, for a request of {tokens} positions"]
    for pool in described["pools"]:
        pinned = ", pinned" if pool["pinned"] else ""
        size = format_bytes(pool["bytes_per_request"])
        lines.append(f"  {pool['name']:<10} {pool['home']:<5} {size:>10} in {pool['buffers']} buffer(s){pinned}")
    lines += ["", *(f"assumed: {text}" for text in described["assumptions"])]
    return "\n".join(lines).rstrip() + "\n"


def to_svg(pipeline: Pipeline) -> str:
    """Streams as rows, stages as boxes from left to right in order of issue, edges as arrows."""
    streams = [stream.name for stream in pipeline.template.streams]
    places: dict[str, tuple[int, int]] = {}
    boxes: list[str] = []
    for column, (when, stage) in enumerate(ordered(pipeline)):
        x, y = _LEFT + column * _COLUMN, _TOP + streams.index(stage.stream) * _ROW
        places[stage.name] = (x, y)
        layers = f" × {len(stage.layers)}" if stage.layers else ""
        boxes.append(
            f'<rect x="{x}" y="{y}" width="{_COLUMN - 40}" height="{_ROW - 24}" rx="5" '
            f'fill="{_COLOURS[stage.resource]}" fill-opacity="0.25" stroke="{_COLOURS[stage.resource]}"/>'
            f'<text x="{x + 8}" y="{y + 17}" font-weight="bold">{escape(stage.name)}{layers}</text>'
            f'<text x="{x + 8}" y="{y + 33}" fill="#555">{escape(when)}</text>'
        )
    width, height = _LEFT + len(places) * _COLUMN, _TOP + len(streams) * _ROW
    arrows = [_arrow(places[edge.before], places[edge.after], str(edge), edge.why) for edge in pipeline.template.edges]
    lanes = [
        f'<text x="8" y="{_TOP + row * _ROW + 24}" font-weight="bold">{escape(name)}</text>'
        f'<line x1="0" y1="{_TOP + row * _ROW - 10}" x2="{width}" y2="{_TOP + row * _ROW - 10}" stroke="#ddd"/>'
        for row, name in enumerate(streams)
    ]
    title = escape(f"{pipeline.method.name}: {pipeline.method.summary}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{title}</title>'
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L10 5L0 10z" fill="#333"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#fff"/><text x="8" y="18">{title}</text>'
        + "".join((*lanes, *boxes, *arrows))
        + "</svg>\n"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int], edge: str, why: str) -> str:
    half = (_COLUMN - 40) // 2
    down = end[1] > start[1]
    x1, y1 = start[0] + half, start[1] + (_ROW - 24 if down else 0)
    x2, y2 = end[0] + half, end[1] + (0 if down else _ROW - 24)
    middle = (y1 + y2) // 2
    dash = ' stroke-dasharray="4 3"' if end[0] < start[0] else ""
    return (
        f'<path d="M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}" fill="none" stroke="#333"{dash} '
        f'marker-end="url(#head)"><title>{escape(edge)}: {escape(why)}</title></path>'
    )


def _access(access: Any) -> str:
    return f"{access.pool}.{access.region.value}" + (
        "" if access.buffer.value == "one" else f" ({access.buffer.value})"
    )
