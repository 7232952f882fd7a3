"""The capacity formula against what PyTorch's allocator had in use at most, in runs on an H200 with synthetic KV."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu.cells import parse
from herald_exec.footprint import run_memory
from herald_pipeline import capacity, catalogue
from herald_pipeline.pipeline import build
from herald_pipeline.pools import Home

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Cells that were among the first of their process: later ones still held the workspaces of earlier ones.
FIRST = [
    "h200-141g_emr-16vcpu/run-dense-32768-38.json",
    "h200-141g_emr-16vcpu/run-dense-32768-80.json",
    "h200-141g_emr-16vcpu/run-herald-32768-80.json",
    "h200-141g_emr-16vcpu-2/run-herald-32768-16.json",
    "h200x2-141g_emr-32vcpu/run-dense-32768-8.json",
    "h200x2-141g_emr-32vcpu/run-herald-32768-34.json",
    "h200x2-141g_emr-32vcpu/llada2-mini_16of32/run-herald-32768-80-gathergpu.json",
]


@pytest.mark.parametrize("name", FIRST)
def test_the_allocator_is_within_one_percent_of_the_formula(name):
    found = json.loads((RESULTS / name).read_text())
    cell, shape, result = parse(found["cell"]), catalogue.get(found["model"]), found["result"]
    gather = str(cell.options.get("gather", "cpu"))
    pipeline = build(shape, cell.what, gather=gather, kv_dtype="bf16", dram_kv_dtype="bf16")
    memory = run_memory(1e18, 1e18, pipeline, on_gpu=True, synthetic=True)
    tokens = cell.context + shape.block_length * result["blocks"]
    budget = capacity.budget(pipeline, tokens, cell.batch, memory)
    formula = budget.total(Home.HBM, transient=False) + budget.passing_bytes
    assert result["hbm_peak_bytes"] == pytest.approx(formula, rel=0.01)
