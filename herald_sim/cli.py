"""`herald-sim`: plan a deployment without the machine.

    herald-sim run --model llada2-mini --method herald --hardware h100-sxm-80g_xeon-8481c --context 32768 --batch 80
    herald-sim ceilings --model llada2-mini --hardware h100-sxm-80g_xeon-8481c --context 32768
    herald-sim methods

With ``--json`` a command prints exactly one JSON object on stdout; everything else goes to stderr.

To add a subcommand: a function in ``herald_sim/commands/``, listed here; options that others have too are in
arguments.py.
"""

import sys

import typer

from herald_pipeline.environment import check_environment
from herald_pipeline.errors import HeraldError
from herald_pipeline.help_pages import program
from herald_sim.commands import planning, running, showing

app = program(
    "herald-sim", "Plan block-diffusion LLM serving: throughput, limits and ceilings of a method on a machine."
)

app.command(cls=running.HELP)(running.run)
for command in (
    planning.ceilings,
    planning.peak,
    showing.describe,
    planning.explain,
    planning.sweep,
    showing.exhibit,
    showing.claims,
    showing.models,
    showing.methods,
    showing.hardware,
):
    app.command()(command)


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and an exit code, never a traceback."""
    try:
        check_environment()
        app()
    except HeraldError as error:
        typer.echo(f"herald-sim: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
