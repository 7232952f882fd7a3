"""`herald-sim describe`, `exhibit`, `claims`, `models`, `methods` and `hardware`: what is known and shipped."""

from pathlib import Path
from typing import Annotated

import typer

from herald_sim.arguments import Block, BudgetShare, Engine, Json, Method, Model, Sets
from herald_sim.commands.output import note, print_json, refuse, starting

PAPER_HARDWARE = "h100-sxm-80g_xeon-8481c"


def describe(
    model: Model,
    method: Method,
    context: Annotated[int, typer.Option("--context", help="Tokens of a request, for pool sizes.")] = 32768,
    block: Block = None,
    budget: BudgetShare = None,
    set_: Sets = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the streams and edges as a picture.")] = None,
    as_json: Json = False,
) -> None:
    """The description of a method: streams, stages, edges and pools."""
    from herald_pipeline import describe as description
    from herald_pipeline.errors import check_number, raise_problems
    from herald_pipeline.outputs import check_ending
    from herald_pipeline.trace import check_writable
    from herald_sim.options import Options
    from herald_sim.text import wrapped

    raise_problems([check_number(context, "context", minimum=1, integer=True)])
    refuse(
        "says nothing of a description, which has no machine; write settings.NAME=VALUE",
        {f"--set {text}": not text.startswith("settings.") for text in set_ or ()},
    )
    if svg is not None:
        check_ending(svg, (".svg",), "an SVG picture", "--svg")
        check_writable(svg, "picture")
    pipeline = Options(model, method, "", block=block, budget=budget, sets=set_ or ()).pipeline()
    if svg is not None:
        svg.write_text(description.to_svg(pipeline), encoding="utf-8")
        note(f"wrote {svg}")
    if as_json:
        print_json(description.to_dict(pipeline, context))
    else:
        lines = description.to_text(pipeline, context).splitlines()
        typer.echo("\n".join(wrapped(line, hang=13) for line in lines))


def exhibit(
    name: Annotated[
        str,
        typer.Argument(
            help="table-2, fig-4, -5, -8, -12, -13, -14, budget-cost, fit, identified, dsb-main, dsb-table-3, "
            "dsb-example."
        ),
    ],
    hardware: Annotated[str, typer.Option("--hardware", help="Profile to recompute it on.")] = PAPER_HARDWARE,
    engine: Engine = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="PATH=VALUE of the profile, repeatable: machine.link.h2d_gb_s=25, engine.x=y."),
    ] = None,
    as_json: Json = False,
) -> None:
    """A published figure or table, recomputed, with the printed values beside ours."""
    from herald_pipeline import hardware_io
    from herald_sim import exhibits
    from herald_sim.exhibits.text import exhibit_text

    refuse("changes no exhibit: its settings are the paper's", starting(set_, "settings."))
    profile = hardware_io.resolve(hardware, engine, set_ or ())
    note(*profile.warnings)
    rows = exhibits.rows(name, profile)
    if as_json:
        print_json({"exhibit": name, "hardware": profile.name, "rows": rows})
    else:
        typer.echo(exhibit_text(name, rows))


def claims(
    verdict: Annotated[str | None, typer.Option("--verdict", help="Only claims with this verdict.")] = None,
    as_json: Json = False,
) -> None:
    """Every numeric claim of the two papers, how it is tested, and what came of it."""
    from herald_sim.listing import claim_rows, claims_text

    rows = claim_rows(verdict)
    if as_json:
        print_json({"claims": rows})
    else:
        typer.echo(claims_text(rows))


def models(as_json: Json = False) -> None:
    """The models known by name, with where each fact was read."""
    from herald_sim.listing import model_rows, models_text

    rows = model_rows()
    if as_json:
        print_json({"models": rows})
    else:
        typer.echo(models_text(rows))


def methods(as_json: Json = False) -> None:
    """The methods, each a choice on six axes."""
    from herald_sim.listing import method_rows, methods_text

    rows = method_rows()
    if as_json:
        print_json({"methods": rows})
    else:
        typer.echo(methods_text(rows))


def hardware(
    name: Annotated[str | None, typer.Argument(help="One profile, or a path: all its numbers.")] = None,
    as_json: Json = False,
) -> None:
    """The machine profiles and the methods that each can price; with a name, where each of its numbers comes from."""
    from herald_sim.listing import hardware_rows, hardware_text, quantities_text

    rows = hardware_rows(name)
    if as_json:
        print_json({"hardware": rows})
    else:
        typer.echo(hardware_text(rows) if name is None else quantities_text(rows[0]))
