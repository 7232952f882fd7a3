"""The model card: its table is that of the evaluation beside the weights."""

import pytest

from herald_exec.reference import SHIPPED
from herald_exec.reference.card import accuracy_table, read_cells
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
