"""One number for one point: every command measures the same blocks of the same answers."""

import json

import pytest
from typer.testing import CliRunner

from herald_pipeline import catalogue, published
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim import exhibits, fast
from herald_sim.cli import app
from herald_sim.exhibits.targets import targets
from herald_sim.explain import explain
from herald_sim.simulate import simulate
from herald_sim.sweep import run_point

HARDWARE = "h100-sxm-80g_xeon-8481c"
CONTEXT, BATCH = 32768, 80
POINT = {"model": "llada2-mini", "method": "herald", "hardware": HARDWARE, "context": CONTEXT, "batch": BATCH}


@pytest.fixture(scope="module")
def by_run():
    options = [text for name, value in POINT.items() for text in (f"--{name}", str(value))]
    return json.loads(CliRunner().invoke(app, ["run", *options, "--no-interval", "--json"]).stdout)["throughput_tok_s"]


def test_run_sweep_explain_and_the_exhibits_print_one_number(by_run, paper_profile):
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    workload = Workload.uniform(CONTEXT, BATCH)
    assert run_point(POINT, fast=False)["throughput_tok_s"] == by_run
    assert explain(pipeline, paper_profile, workload).result.throughput_tok_s == by_run
    for name in ("table-2", "fig-12", "fig-14"):
        rows = exhibits.rows(name, paper_profile)
        assert by_run in [value for row in rows for value in row.values()], name


def test_the_fit_sees_the_number_that_run_prints(by_run, paper_profile):
    (target,) = [
        t for t in targets() if (t.exhibit, t.model, t.method, t.batch) == ("Table II", "llada2-mini", "herald", BATCH)
    ]
    assert target.predict(paper_profile) == by_run
    assert (
        target.published
        == published.find(
            exhibit="Table II", metric="peak_throughput", method="HERALD", context="32K", model="LLaDA2.0-mini"
        )[0].number
    )


@pytest.mark.parametrize(
    ("method", "context", "batch"), [("dense", 16384, 32), ("mage-cpu", 16384, 96), ("herald", 16384, 160)]
)
def test_two_blocks_more_in_the_window_change_a_figure_by_less_than_three_in_a_thousand(
    method, context, batch, paper_profile
):
    """Answers that begin two blocks earlier and end at the same length."""
    pipeline = build(catalogue.get("llada2-mini"), method)
    usual = Workload.uniform(context, batch)
    longer = Workload.uniform(context - 64, batch, gen_tokens=512 + 64)
    one, other = (simulate(pipeline, paper_profile, w, beyond_memory=True).throughput_tok_s for w in (usual, longer))
    assert other == pytest.approx(one, rel=3e-3)


def test_fast_mode_leaves_out_the_blocks_that_events_leave_out(paper_profile):
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    for tokens in (160, 192, 512):
        workload = Workload.uniform(16384, 8, gen_tokens=tokens)
        by_events = simulate(pipeline, paper_profile, workload).throughput_tok_s
        assert fast.evaluate(pipeline, paper_profile, workload).throughput_tok_s == pytest.approx(by_events, rel=1e-9)


def test_the_ledger_of_claims_states_the_values_that_the_exhibit_prints(paper_profile):
    words = {"dense": "dense", "infinigen": "infinigen", "mage-offload": "mage", "herald": "herald"}
    results = {claim.id: claim.result for claim in published.claims()}
    for target in targets():
        if target.exhibit == "Table II":
            stated = results[f"herald-table2-{words[target.method]}-{target.context // 1024}k"]
            value = target.predict(paper_profile)
            digits = ",.0f" if value >= 600 else ".1f"
            forms = {format(value, digits), format(value, ",.0f")}
            assert any(f" {form} [" in stated for form in forms), (target.key, value, stated)
