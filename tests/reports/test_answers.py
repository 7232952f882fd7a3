"""What the model wrote, on the page."""

import json

import pytest

from herald_pipeline.errors import ConfigError
from reports.answers import section
from reports.page import render


@pytest.fixture
def written(tmp_path):
    def answer(text, right):
        return {"text": text, "right": right, "partial": float(right), "tokens": 8, "forwards": 4}

    total = {"right": 1, "of": 1, "accuracy": {"value": 1.0, "low": 0.21, "high": 1.0}, "tokens_per_forward": 2.0}
    rows = [
        {
            "task": "kv",
            "question": "Which <code>?",
            "wanted": ["40583"],
            "answers": {"dense": answer("It is 40583.", True), "herald": answer("x" * 500, False)},
        }
    ]
    document = {"model": "herald-ref", "context": 1024, "budget": None, "rows": rows}
    document["methods"] = {"dense": total, "herald": {**total, "right": 0}}
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_right_and_wrong_answers_are_told_apart(written):
    (row,) = section(written).table.rows
    assert [cell.kind for cell in row] == ["", "", "", "good", "bad"]


def test_a_long_answer_is_cut_and_markup_is_shown_as_text(written):
    html = render("t", "l", [section(written)])
    assert "x" * 200 not in html
    assert "Which &lt;code&gt;?" in html


def test_accuracy_stands_with_its_interval(written):
    assert "dense: 1 of 1 right (95%: 0.21 to 1.00)" in section(written).texts[0]


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ConfigError, match=r"make it: python -m herald_exec\.reference answers --out"):
        section(tmp_path / "none.json")


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="lacks model, context, rows, methods"):
        section(path)
