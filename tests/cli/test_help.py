"""Help pages of the commands with many options: every option stands in one group, in its words."""

import re
import sys

import pytest
import typer

from calibration.cli import app as calibration_app
from herald_exec.cli import app as exec_app
from herald_exec.run_command import HELP as EXEC_HELP
from herald_pipeline.help_pages import grouped
from herald_sim.cli import app as sim_app
from herald_sim.commands.running import HELP as SIM_HELP
from reports.cli import app as reports_app

COMMANDS = [(sim_app, SIM_HELP), (exec_app, EXEC_HELP)]


def page(app, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["command", *arguments, "--help"])
    with pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("app", "command"), COMMANDS)
def test_every_option_stands_in_exactly_one_group_and_none_is_misspelled(app, command):
    options = [param.opts[0] for param in typer.main.get_command(app).commands["run"].params]
    assert sorted(name for names in command.groups.values() for name in names) == sorted(options)


@pytest.mark.parametrize(("app", "command"), COMMANDS)
def test_the_page_shows_the_groups_in_order_with_their_options(app, command, monkeypatch, capsys):
    text = page(app, monkeypatch, capsys, "run")
    titles = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert titles == [*command.groups, "Options"]
    for title, names in command.groups.items():
        part = text.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert [name for name in names if f"  {name}" not in part] == []


def test_what_stands_in_no_group_comes_last(monkeypatch, capsys):
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(cls=grouped({"First": "--b"}))
    def command(a: int = 1, b: int = 2) -> None:
        pass

    text = page(app, monkeypatch, capsys)
    assert text.index("First:") < text.index("--b") < text.index("Options:") < text.index("--a") < text.index("--help")


@pytest.mark.parametrize("app", [sim_app, exec_app, calibration_app, reports_app])
def test_a_program_s_page_says_the_whole_first_sentence_of_every_command(app, monkeypatch, capsys):
    said = " ".join(page(app, monkeypatch, capsys).split())
    commands = typer.main.get_command(app).commands
    assert len(commands) > 1
    for name, command in commands.items():
        first = re.split(r"\.(?:\s|$)", " ".join(command.help.split("\n\n")[0].split()))[0]
        assert f"{name} {first}" in said, name
    assert "..." not in said.split("Commands:")[1]
