"""Messages at the border."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from herald_pipeline import methods
from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems, read_failure, unknown_name
from herald_pipeline.units import GB, GIB, format_bytes, format_ns, transfer_ns


@pytest.mark.parametrize(
    ("value", "rules", "message"),
    [
        (math.nan, {}, "rate must be finite, got nan"),
        (math.inf, {}, "rate must be finite, got inf"),
        ("3", {}, "rate must be a number, got '3'"),
        (True, {}, "rate must be a number, got True"),
        (0, {"above": 0}, "rate must be > 0, got 0"),
        (-1, {"minimum": 0}, "rate must be >= 0, got -1"),
        (2.5, {"integer": True}, "rate must be a whole number, got 2.5"),
        (9, {"maximum": 8}, "rate must be <= 8, got 9"),
    ],
)
def test_a_number_that_breaks_a_rule_is_named_with_its_path(value: object, rules: dict, message: str) -> None:
    assert check_number(value, "rate", **rules) == message


def test_a_good_number_has_no_problem() -> None:
    assert check_number(3, "rate", above=0, integer=True) is None


def test_all_problems_are_raised_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        raise_problems(["first", None, "second"])
    assert caught.value.problems == ["first", "second"]


def test_the_closest_name_is_offered() -> None:
    assert str(unknown_name("method", "heral", ["herald", "dense"])) == "unknown method 'heral'; did you mean 'herald'?"


def test_without_a_close_name_all_are_listed() -> None:
    assert did_you_mean("xyz", ["dense", "herald"]) == "; valid: dense, herald"


@pytest.mark.parametrize(("typed", "meant"), [("kw", "kv"), ("h2d", "h2d_gb_s")])
def test_half_a_name_is_enough_where_it_begins_alike(typed: str, meant: str) -> None:
    assert did_you_mean(typed, ["log", meant]) == f"; did you mean {meant!r}?"


def test_all_methods_are_no_misspelling_of_one() -> None:
    assert did_you_mean("all", methods.names()) == f"; valid: {', '.join(methods.names())}"


def test_one_gb_at_one_gb_per_second_takes_a_second_and_one_gib_takes_longer() -> None:
    assert transfer_ns(GB, 1.0) == 1_000_000_000
    assert transfer_ns(GIB, 1.0) == 1_073_741_824


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (1500, "1.50 kB"), (85.5e9, "85.50 GB"), (2e12, "2000.00 GB")]
)
def test_bytes_are_shown_in_decimal_units(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("duration", "text"), [(12, "12 ns"), (1500, "1.50 us"), (2.5e6, "2.50 ms"), (3e9, "3.00 s")])
def test_durations_are_shown_in_the_fitting_unit(duration: float, text: str) -> None:
    assert format_ns(duration) == text


def test_a_file_that_cannot_be_read_is_explained_without_the_systems_number(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "runs.csv").read_text(encoding="utf-8")
    assert read_failure(missing.value) == "no such file or directory"


def test_a_problem_that_two_rules_find_is_said_once():
    with pytest.raises(ConfigError) as found:
        raise_problems(["budget must be <= 1, got 7.0", None, "budget must be <= 1, got 7.0"])
    assert found.value.problems == ["budget must be <= 1, got 7.0"]


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("herald_pipeline", "herald_sim", "herald_exec", "calibration", "reports")


def bare_errors(source: str) -> Iterator[int]:
    """Lines of handlers of ``OSError`` whose messages hold the error as it is: ``[Errno 2] ...``."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or handler.type is None or handler.name is None:
            continue
        if any(isinstance(node, ast.Name) and node.id == "OSError" for node in ast.walk(handler.type)):
            for node in ast.walk(handler):
                bare = isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name)
                if bare and node.value.id == handler.name:
                    yield node.lineno


def test_a_bare_error_in_a_message_is_found() -> None:
    source = "try:\n    f()\nexcept (OSError, ValueError) as e:\n    raise X(f'{p}: {HOW}') from None\n"
    assert list(bare_errors(source.replace("HOW", "e"))) == [4]
    assert list(bare_errors(source.replace("HOW", "read_failure(e)"))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_message_shows_the_number_of_a_system_error(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in bare_errors(path.read_text(encoding="utf-8"))
    ]
    assert found == []
