"""The model card: its table is that of the evaluation beside the weights."""

import pytest

from herald_exec.reference import SHIPPED
from herald_exec.reference.card import accuracy_table, compare_runs, read_cells
from herald_exec.reference.scoring import wilson_interval
from herald_pipeline.errors import ConfigError


def test_the_shipped_cards_table_is_that_of_its_evaluation():
    assert accuracy_table(read_cells(SHIPPED)) in (SHIPPED / "README.md").read_text(encoding="utf-8")


def test_a_cell_that_was_not_run_stays_empty():
    exact = {"value": 0.5, "low": 0.25, "high": 0.75}
    cells = [{"task": "kv", "context": 1024, "exact": exact, "steps_per_block": 3.0}]
    cells.append(cells[0] | {"task": "hop", "context": 4096, "steps_per_block": 7.26})
    assert accuracy_table(cells).splitlines()[2:] == [
        "| kv | 0.50 (0.25-0.75) |  |  |",
        "| hop |  | 0.50 (0.25-0.75) | 7.3 |",
    ]


@pytest.mark.parametrize(("content", "words"), [("[", "cannot be read"), ("[]", "--evaluate-s")])
def test_an_evaluation_without_cells_is_refused(tmp_path, content, words):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_cells(tmp_path)


def test_a_folder_without_an_evaluation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.json"):
        read_cells(tmp_path)


def made(right, task="kv", context=4096, trials=128):
    return {"task": task, "context": context, "exact": wilson_interval(right, trials)._asdict()}


def test_two_equal_runs_are_alike_and_two_far_apart_are_not():
    same, apart = compare_runs([made(120), made(98, "hop")], [made(120), made(114, "hop")])
    assert (same["alike"], same["within"], same["difference"]["value"]) == (True, True, 0.0)
    assert not apart["alike"]
    assert apart["difference"]["value"] == pytest.approx(0.125)


def test_the_interval_of_a_difference_is_newcombes():
    """56 of 70 against 48 of 80: 0.2, 0.0524 to 0.3339 (Newcombe 1998, method 10)."""
    (found,) = compare_runs([made(48, trials=80)], [made(56, trials=70)])
    assert found["difference"]["value"] == pytest.approx(0.2)
    assert found["difference"]["low"] == pytest.approx(0.0524, abs=5e-4)
    assert found["difference"]["high"] == pytest.approx(0.3339, abs=5e-4)


def test_only_shared_cells_are_compared():
    assert len(compare_runs([made(1), made(1, "hop")], [made(2, "hop"), made(2, "log")])) == 1
    with pytest.raises(ConfigError, match="share no task"):
        compare_runs([made(1)], [made(1, "hop")])
