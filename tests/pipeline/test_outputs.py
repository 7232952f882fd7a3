"""Outputs are tried before the work begins."""

from pathlib import Path

import pytest

from herald_pipeline.errors import ConfigError
from herald_pipeline.outputs import check_ending, check_file, check_folder


def test_a_folder_that_is_not_there_is_made_and_left_empty(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_is_not_made_before_there_is_something_to_write(tmp_path):
    check_file(tmp_path / "a" / "x.json")
    assert not (tmp_path / "a" / "x.json").exists()


def test_a_file_in_the_place_of_a_folder_is_refused_with_the_option(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match=r"--png .*x: nothing can be written there"):
        check_folder(tmp_path / "x", "--png")


def test_a_folder_in_which_nothing_can_be_made_is_refused():
    with pytest.raises(ConfigError, match="nothing can be written there"):
        check_file(Path("/proc/x.json"))


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder; name a file in it"):
        check_file(tmp_path)


TRACE = (".json", ".json.gz")


@pytest.mark.parametrize("name", ["x.csv", "x.JSONL", "x.png", "x.csv.gz", "x.zip"])
def test_an_ending_of_another_format_is_refused_with_the_valid_ones(name):
    with pytest.raises(ConfigError, match=r"--trace-out .*: a trace is written there, .* end its name in .json or .js"):
        check_ending(Path(name), TRACE, "a trace", "--trace-out")


@pytest.mark.parametrize("name", ["x.json", "x.JSON", "x.json.gz", "x.gz", "x", "run-0.5", "run.trace", "a.csv/x"])
def test_the_right_ending_and_names_that_say_nothing_pass(name):
    check_ending(Path(name), TRACE, "a trace")


def test_what_is_not_compressed_is_not_named_so():
    with pytest.raises(ConfigError, match=r"x\.svg\.gz: a picture is written there, \.svg\.gz says otherwise"):
        check_ending(Path("x.svg.gz"), (".svg",), "a picture", "--svg")
