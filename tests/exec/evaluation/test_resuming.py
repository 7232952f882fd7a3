"""Study files: runs go on from them, machines share a plan, and cells of different runs are never mixed."""

import gzip
import json
from dataclasses import replace

import pytest

from herald_exec.evaluation.plan import REDUCED, read_study, run_study, study_facts
from herald_exec.evaluation.resuming import parse_part
from herald_exec.evaluation.summary import read_rows
from herald_exec.models import random_model, tiny_shape
from herald_exec.reference import read_shipped_material
from herald_pipeline.errors import ConfigError

PLAN = replace(
    REDUCED,
    rules=(("dense", (1.0,)), ("herald", (0.05, 0.1))),
    tasks=("kv", "code"),
    contexts=(256,),
    samples=2,
    threshold=0.002,
)


@pytest.fixture(scope="module")
def model():
    return random_model(tiny_shape(vocab_size=4096, eos_token_ids=(4095,)), seed=3)


@pytest.fixture(scope="module")
def material():
    return read_shipped_material()


@pytest.fixture(scope="module")
def rows(model, material):
    return list(run_study(model, material, PLAN))


def key(row):
    return row["rule"], row["budget"], row["task"], row["context"]


def timeless(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_parts_together_are_the_whole_plan_each_cell_once_and_alike(model, material, rows):
    parts = [list(run_study(model, material, PLAN, part=(number, 2))) for number in (1, 2)]
    assert [len(part) for part in parts] == [3, 3]
    shared = {key(row): timeless(row) for part in parts for row in part}
    assert shared == {key(row): timeless(row) for row in rows}


def test_a_run_goes_on_where_its_file_ends(model, material, rows, tmp_path):
    path = write(tmp_path / "study.jsonl", rows[:4])
    done = read_study(path, study_facts(model, PLAN))
    rest = [timeless(row) for row in run_study(model, material, PLAN, done=done)]
    assert rest == [timeless(row) for row in rows[4:]]


def test_a_line_that_was_cut_off_runs_again(model, rows, tmp_path):
    path = write(tmp_path / "study.jsonl", rows[:2])
    whole = path.read_text()
    path.write_text(whole[:-20])
    done = read_study(path, study_facts(model, PLAN))
    assert list(done) == [key(rows[0])]
    assert path.read_text() == whole.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"samples": 3}, "samples 2 instead of 3"), ({"threshold": 0.5}, "threshold"), ({"first_seed": 5}, "first_seed")],
)
def test_a_file_of_another_run_is_refused(model, rows, tmp_path, change, words):
    path = write(tmp_path / "study.jsonl", rows[:1])
    with pytest.raises(ConfigError, match=words):
        read_study(path, study_facts(model, replace(PLAN, **change)))


def test_a_file_of_other_weights_is_refused(rows, tmp_path):
    path = write(tmp_path / "study.jsonl", rows[:1])
    other = random_model(tiny_shape(vocab_size=4096, eos_token_ids=(4095,)), seed=4)
    with pytest.raises(ConfigError, match="weights"):
        read_study(path, study_facts(other, PLAN))


def test_a_folder_in_the_place_of_a_file_is_refused_in_words(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read as JSON lines: is a directory$"):
        read_rows(tmp_path)


def test_a_file_of_something_else_is_refused(model, tmp_path):
    path = write(tmp_path / "study.jsonl", [{"rule": "dense"}])
    with pytest.raises(ConfigError, match="line 1 is no cell"):
        read_study(path, study_facts(model, PLAN))


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "a/b", "1/2/3", "-1/2", "1.0/2"])
def test_an_impossible_part_is_refused(text):
    with pytest.raises(ConfigError, match="i/n"):
        parse_part(text)


def test_a_part_is_a_number_of_how_many():
    assert parse_part("2/3") == (2, 3)


def test_parts_are_shown_together_also_compressed(rows, tmp_path):
    plain = write(tmp_path / "one.jsonl", rows[::2])
    packed = tmp_path / "two.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows[1::2]).encode()))
    assert {key(row) for row in read_rows(plain, packed)} == {key(row) for row in rows}


def test_cells_of_two_trainings_are_not_shown_together(rows, tmp_path):
    one = write(tmp_path / "one.jsonl", rows[:1])
    two = write(tmp_path / "two.jsonl", [rows[1] | {"weights": "other"}])
    with pytest.raises(ConfigError, match="differ in weights"):
        read_rows(one, two)


def test_cells_of_windows_that_slide_are_not_shown_as_a_study(rows, tmp_path):
    """The same rule and budget at two slides would be taken for one cell written twice."""
    path = write(tmp_path / "sliding.jsonl", [rows[0] | {"slide": "32/32"}])
    with pytest.raises(ConfigError, match="sliding-show"):
        read_rows(path)


def test_a_broken_line_is_named_by_its_number(rows, tmp_path):
    path = write(tmp_path / "one.jsonl", rows[:2])
    path.write_text(path.read_text() + '{"model": "cut', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"one\.jsonl, line 3 is no JSON"):
        read_rows(path)
