"""What is printed for people keeps to 100 columns, and to a narrower terminal's own."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from unittest import mock

import pytest

from herald_sim import cli
from herald_sim.text import WIDTH, table, table_rows, wrapped

HARDWARE = "h100-sxm-80g_xeon-8481c"
RUN = ("run", "--method", "dense", "--model", "tiny", "--hardware", HARDWARE, "--context", "64", "--gen-tokens", "96")


def printed(*arguments):
    """What a command that succeeds printed on stdout and on stderr."""
    out, err = io.StringIO(), io.StringIO()
    called = mock.patch.object(sys, "argv", ["herald-sim", *arguments])
    with redirect_stdout(out), redirect_stderr(err), called, suppress(SystemExit):
        cli.main()
    assert out.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("models",),
        ("methods",),
        ("hardware",),
        ("describe", "--model", "llada2-mini", "--method", "herald"),
        ("describe", "--model", "sdar-8b", "--method", "infinigen"),
        (*RUN, "--batch", "1"),
        *(("exhibit", name) for name in ("table-2", "fig-5", "fig-13", "identified", "dsb-main", "dsb-table-3")),
    ],
    ids=lambda arguments: " ".join(arguments[:5:2]),
)
def test_no_line_is_wider_than_a_hundred_columns(arguments):
    lines = [line for text in printed(*arguments) for line in text.splitlines()]
    assert lines
    assert max(map(len, lines)) <= WIDTH


def test_a_narrow_terminal_gets_lines_of_its_width(monkeypatch):
    line = "  word" * 30
    piped = wrapped(line, 4).splitlines()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = wrapped(line, 4).splitlines()
    monkeypatch.setenv("COLUMNS", "300")
    wide = wrapped(line, 4).splitlines()
    assert 54 < max(map(len, narrow)) <= 60
    assert 94 < max(map(len, piped)) <= WIDTH
    assert wide == piped
    assert all(text.startswith("    word") for text in narrow[1:])


def test_a_table_that_fits_keeps_every_cell_on_one_line():
    assert table(("name", "two words"), [("a", "1"), ("b", "22")]).splitlines() == [
        "name  two words",
        "a             1",
        "b            22",
    ]


def test_cells_of_a_table_that_is_too_wide_go_on_below_themselves_and_lose_no_word():
    sentence = "every word of this cell is still there " * 4
    heading, row, other = table_rows(("name", "what"), [("first", sentence), ("second", "short")], indent=2)
    assert max(map(len, row.splitlines())) <= WIDTH
    assert row.split() == ["first", *sentence.split()]
    assert heading.split() == ["name", "what"]
    assert other == "  second  short"
