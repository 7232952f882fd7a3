"""Commands say "predict", as the pages do; keys of files that are already written stay as they are."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEY = re.compile(r"\w*foretold\w*")
"""A key or column of a file, alone in its text: ``foretold_tok_s``."""


@pytest.mark.parametrize("package", ["calibration", "reports", "herald_sim", "herald_pipeline", "herald_exec"])
def test_no_text_says_foretell(package):
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                key = KEY.fullmatch(node.value) and node.value != "foretold"
                if re.search("foretold|foretell", node.value, re.IGNORECASE) and not key:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value[:60]}")
    assert found == []


def test_the_columns_of_interventions_are_predicted_and_measured():
    from calibration.text import interventions_text

    row = {
        "name": "8-bit keys off -> on",
        "predicted_delta": 0.5,
        "measured_delta": 0.4,
        "predicted_binding": ["cpu", "gpu"],
        "measured_binding": ["cpu", "gpu"],
        "as_foretold": True,
    }
    summary = {
        "changes": 1,
        "run": 1,
        "same_direction": 1,
        "mean_difference": 0.1,
        "worst_difference": 0.1,
        "binding_as_foretold": 1,
    }
    facts = {"model": "llada2-mini", "profile": "p", "written": "then", "commit": "abc"}
    text = interventions_text({**facts, "rows": [row], "summary": summary})
    assert [name for name in ("binding, predicted", "binding, measured", "as predicted") if name not in text] == []
    assert "binding resource as predicted 1" in text
