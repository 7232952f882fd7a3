"""`herald-exec`: the real thing on the machine at hand.

    herald-exec run --model tiny --method herald --context 4096 --batch 4 --blocks 6
    herald-exec generate --model DIR "Why is the sky blue?"
    herald-exec doctor

With ``--json`` a command prints exactly one JSON object on stdout; everything else goes to stderr.
"""

import sys

import typer

from herald_exec import decoding_commands
from herald_exec.doctor import doctor
from herald_exec.evaluation.harness_command import harness_command
from herald_exec.generate_command import generate_command
from herald_exec.run_command import HELP, run
from herald_pipeline.environment import check_environment
from herald_pipeline.errors import HeraldError
from herald_pipeline.help_pages import program

app = program(
    "herald-exec", "Run block-diffusion LLM decoding for real: methods, checkpoints, kernels of this machine."
)
app.command(cls=HELP)(run)
app.command()(doctor)
app.command("generate")(generate_command)
app.command("evaluate")(harness_command)
decoding_commands.register(app)


def _mount_kernels() -> None:
    try:
        from herald_exec.kernels.command import kernels
    except ImportError as problem:
        reason = str(problem)

        # Whatever options are passed, what is said is why there are no kernels.
        @app.command("kernels", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def missing() -> None:
            """Check and measure the CPU kernels of this machine (not built here)."""
            typer.echo(f"herald-exec: {reason}", err=True)
            raise typer.Exit(1)

        return
    app.command()(kernels)


_mount_kernels()


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and an exit code, never a traceback."""
    try:
        check_environment()
        app()
    except HeraldError as error:
        typer.echo(f"herald-exec: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
