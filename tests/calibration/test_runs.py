import csv
from contextlib import nullcontext
from dataclasses import replace

import pytest

from calibration import runs
from calibration.points import Point
from calibration.profile_file import write_csv
from calibration.runs import read_samples, row_of_sample
from herald_exec.models import tiny
from herald_pipeline.errors import ConfigError
from tests.calibration.conftest import sample

HEADER = "method,context,batch,throughput_tok_s"


def written(tmp_path, text):
    path = tmp_path / "my.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_least_table_is_read(tmp_path):
    (found,) = read_samples(written(tmp_path, f"{HEADER}\ndense,1024,2,93.5\n"))
    assert found.point == Point("dense", 1024, 2)
    assert found.figures == {"throughput_tok_s": 93.5}
    assert found.reference_s is None


def test_own_runs_are_read_back_as_they_were(tmp_path):
    made = replace(sample(93.5, stages={"denoise": 0.0125, "select": 0.002}, reference_s=0.01), shares={})
    path = tmp_path / "runs.csv"
    write_csv(path, [row_of_sample(made, model="demo")])
    (found,) = read_samples(path)
    assert found.point == made.point
    assert found.stages == made.stages
    assert found.figures == pytest.approx(made.figures, rel=1e-5)
    assert found.reference_s == made.reference_s


def test_a_missing_column_is_named_with_the_columns_that_a_table_has(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_samples(written(tmp_path, "method,context,throughput_tok_s\ndense,1024,90\n"))
    assert "column 'batch' is missing; a table of runs has method, context, batch, throughput_tok_s" in str(
        refused.value
    )


def test_a_misspelled_column_is_refused_with_the_closest(tmp_path):
    with pytest.raises(ConfigError, match="unknown column 'block_tim_s'; did you mean 'block_time_s'"):
        read_samples(written(tmp_path, f"{HEADER},block_tim_s\ndense,1024,2,93.5,0.1\n"))


def test_columns_of_other_programs_are_left_alone_and_said(tmp_path):
    said = []
    read_samples(written(tmp_path, f"{HEADER},zzz_ticket\ndense,1024,2,93.5,abc\n"), said.append)
    assert said == [f"{tmp_path / 'my.csv'}: columns not used: zzz_ticket"]


def test_all_cells_that_are_no_numbers_are_named_with_their_lines(tmp_path):
    with pytest.raises(ConfigError) as refused:
        read_samples(written(tmp_path, f"{HEADER}\ndense,1024,2,fast\ndense,x,2,90\ndense,64,1,-3\n"))
    message = str(refused.value)
    assert "line 2: throughput_tok_s must be a number, got 'fast'" in message
    assert "line 3: context must be a number, got 'x'" in message
    assert "line 4: throughput_tok_s must be >= 0" in message


@pytest.mark.parametrize("cell", ["", "0", "0.0"])
def test_a_run_without_makespan_has_no_throughput(tmp_path, cell):
    (found,) = read_samples(written(tmp_path, f"{HEADER}\ndense,1024,2,{cell}\n"))
    assert found.figures == {}


def test_a_table_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no runs under the header"):
        read_samples(written(tmp_path, HEADER + "\n"))


def test_a_table_keeps_columns_that_only_some_lines_have(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, [{"a": 1}, {"a": 2, "b": 3}])
    with path.open(encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]


def test_what_a_table_does_not_say_is_assumed_and_said(tmp_path):
    usual = {"steps": "20", "blocks": "16", "kv_dtype": "bf16"}
    said = []
    path = written(tmp_path, f"{HEADER},steps\ndense,1024,2,93.5,8\ndense,2048,2,90,\n")
    first, second = read_samples(path, said.append, usual)
    assert first.point == Point("dense", 1024, 2, steps=8, blocks=16, kv_dtype="bf16")
    assert second.point == Point("dense", 2048, 2, steps=20, blocks=16, kv_dtype="bf16")
    assert said == [
        f"{path} does not say how its runs were made: blocks 16, kv_dtype bf16 assumed; add columns where it differs"
    ]


def test_a_table_that_says_all_of_it_is_read_without_a_word(tmp_path):
    said = []
    path = written(tmp_path, f"{HEADER},steps,kv_dtype\ndense,1024,2,93.5,8,fp32\n")
    read_samples(path, said.append, {"steps": "20", "kv_dtype": "bf16"})
    assert said == []


@pytest.mark.parametrize(
    ("method", "of_main"),
    [
        ("dense", True),
        ("mage-cpu", True),
        ("mage-cpu-representative", True),
        ("herald", False),
        ("herald-no-draft", False),
    ],
)
def test_runs_with_nothing_beside_the_steps_have_the_cores_that_play_the_gpu(method, of_main, monkeypatch):
    asked = []
    monkeypatch.setattr(runs, "divide_cores", lambda *_: ((0,), (1,)))
    monkeypatch.setattr(runs, "pinned", lambda cores: asked.append(cores) or nullcontext())
    monkeypatch.setattr(runs, "decode", lambda *_, **__: None)
    runs.run_point(Point(method, 64, 1, steps=2, blocks=2, block_length=8, kv_dtype="fp32"), tiny(block_length=8))
    assert asked == [(0,) if of_main else ()]
