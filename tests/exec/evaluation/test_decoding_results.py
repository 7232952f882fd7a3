"""The run that docs/accuracy.md reports: the whole plan, and sweeps printed in their factor's order."""

from pathlib import Path

import pytest

from herald_exec.evaluation.decoding_plan import PLAN, Cell
from herald_exec.evaluation.decoding_report import read_results, text

RUN = Path(__file__).parents[3] / "benchmarks" / "results" / "evaluation_herald-ref_h200" / "decoding.jsonl.gz"


@pytest.fixture(scope="module")
def rows():
    return read_results(RUN)


def test_the_measured_run_holds_every_cell_of_the_plan_once(rows):
    assert [Cell(**row["cell"]) for row in rows] == [cell for cell, _ in PLAN.cells()]
    assert {row["plan"] for row in rows} == {f"{PLAN.name} {PLAN.fingerprint}"}


def test_a_sweep_is_printed_by_system_and_factor_with_unbounded_last(rows):
    part = [row for row in rows if "s_max" in row["groups"] and row["cell"]["task"] == "few"]
    section = text(part).split("s_max, few")[1].split("\n\n")[0]
    lines = [line for line in section.splitlines() if "dsb-greedy" in line]
    bounds = [line.split(" max ")[1].split()[0] for line in lines]
    assert bounds == ["32", "48", "64", "80", "96", "inf"] * 2
