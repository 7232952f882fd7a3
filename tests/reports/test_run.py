"""The page of a run: what a trace says, for one run or a few beside one another."""

import sys

import pytest

from herald_pipeline import catalogue, methods
from herald_pipeline.errors import ConfigError, RunError
from herald_pipeline.pipeline import build as build_pipeline
from herald_pipeline.trace import Span, Trace, write_chrome
from reports import cli, frames
from reports.page import render
from reports.run import build
from reports.theme import STAGE_COLORS

MS = 1_000_000


def span(launch, stage, stream, block, start_ms, end_ms, num_bytes=0.0):
    resource = {"main": "gpu", "retrieval": "cpu"}.get(stream, stream)
    times = (int(start_ms * MS), int(end_ms * MS))
    return Span(stage, stream, resource, block, 0, None, 1, *times, 0, num_bytes, 0.0, 0.0, 0.0, launch, ())


def spans():
    """Two blocks of 10 ms; block 1 has two steps of 4 and 6 ms, beside which 4 MB are selected in 2 ms."""
    return [
        span(0, "prefill", "main", -1, 0, 5),
        span(1, "denoise", "main", 0, 10, 20, 9e9),
        span(2, "denoise", "main", 1, 20, 24, 9e9),
        span(3, "denoise", "main", 1, 24, 30, 9e9),
        span(4, "select", "retrieval", 1, 21, 23, 4e6),
    ]


def result(**figures):
    return {"throughput_tok_s": 12345.6, "block_time_s": 0.01, "retrieval_time_s": 0.002, "batch": 3, **figures}


@pytest.fixture
def written(tmp_path):
    """Write a trace and return its path."""

    def write(name="a", source="measured", method="herald", spans_=None, **facts):
        path = tmp_path / f"{name}.trace.json.gz"
        found = {"model": "tiny", "method": method, **facts}
        write_chrome(Trace(source, found, spans() if spans_ is None else spans_), path)
        return path

    return write


def rows(section):
    return {row[0].text: [cell.text for cell in row[1:]] for row in section.table.rows}


def test_a_run_has_its_figures_a_timeline_and_its_stages(written):
    title, lead, sections = build([written(device="cpu", result=result())])
    assert title == "HERALD: measured"
    assert lead == "measured: tiny with herald on cpu, batch 3, 12,346 tok/s."
    assert [section.title for section in sections] == ["Figures", "Timeline of block 1", "Stages"]
    assert rows(sections[0])["time of a block"] == ["10.00 ms"]
    assert "measured: 10.0 ms, most of it denoise" in sections[1].chart.to_dict()["description"]
    assert "e+" not in render(title, lead, sections).split("<script>")[0]


def test_stages_are_those_of_all_blocks_but_the_first(written):
    found = rows(build([written()])[2][2])
    assert found["denoise"] == ["main", "measured", "2", "5.00 ms", "6.00 ms", "100.0%", ""]
    assert found["select"] == ["retrieval", "measured", "1", "2.00 ms", "2.00 ms", "20.0%", "2"]
    assert "prefill" not in found


def test_a_run_of_one_block_is_shown_by_it(written):
    only = [one for one in spans() if one.block < 1]
    _, _, sections = build([written(spans_=only)])
    assert sections[1].title == "Timeline of block 0"
    assert rows(sections[2])["denoise"][2:4] == ["1", "10.00 ms"]


def test_two_runs_stand_beside_one_another_with_their_difference(written):
    first = written("m", result=result(assumptions=["both", "first alone"]))
    second = written("s", "simulated", result=result(throughput_tok_s=6172.8, assumptions=["both"]))
    title, _, sections = build([first, second])
    assert title == "HERALD: measured beside simulated"
    assert rows(sections[0])["throughput (tok/s, warm-up blocks excluded)"] == ["12,346", "6,173", "-50.0%"]
    assert sections[0].notes == ["assumed: both", "measured: assumed: first alone"]
    assert sections[1].chart.to_dict()["facet"]["row"]["sort"] == ["measured", "simulated"]


def test_runs_of_one_source_are_told_apart_by_method_and_then_by_file(written):
    assert build([written("a"), written("b", method="dense")])[0] == "HERALD: herald measured beside dense measured"
    assert build([written("a"), written("b")])[0] == "HERALD: a beside b"


def test_a_method_without_retrieval_has_no_time_of_it(written):
    _, _, sections = build([written(result=result(retrieval_time_s=0.0))])
    assert "retrieval, a pass" not in rows(sections[0])


def test_what_a_simulation_took_from_outside_the_measured_range_is_named(written):
    _, _, sections = build([written(source="simulated", result=result(extrapolated=["machine.link.h2d_gb_s"]))])
    assert sections[0].notes == ["simulated: outside what was measured: machine.link.h2d_gb_s"]


def test_what_prefill_took_from_outside_is_named_as_prefills(written):
    _, _, sections = build([written(source="simulated", result=result(prefill_extrapolated=["gemm_efficiency"]))])
    assert sections[0].notes == ["simulated: prefill is outside what was measured: gemm_efficiency"]


def test_a_trace_without_figures_says_so(written):
    _, _, sections = build([written()])
    assert sections[0].table is None
    assert any("states no figures" in note for note in sections[0].notes)


def test_a_block_of_more_launches_than_a_chart_holds_is_named_and_not_cut(written, monkeypatch):
    monkeypatch.setattr(frames, "MAX_SPANS", 2)
    _, _, sections = build([written()])
    assert sections[1].chart is None
    assert "Block 1 has 3 launches" in sections[1].texts[0]


def test_what_cannot_be_shown_is_refused(written, tmp_path):
    path = written()
    with pytest.raises(ConfigError, match="holds no block 7"):
        build([path], block=7)
    with pytest.raises(ConfigError, match="the same trace is given twice"):
        build([path, path])
    with pytest.raises(ConfigError, match="5 traces are more than a page shows"):
        build([path] * 5)
    with pytest.raises(ConfigError, match="nothing was decoded"):
        build([written("p", spans_=spans()[:1])])
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(RunError, match="write one with --trace-out"):
        build([other])


@pytest.mark.parametrize("name", methods.names())
def test_no_two_stages_of_a_method_have_one_colour(name):
    stages = {stage.name for stage in build_pipeline(catalogue.get("llada2-mini"), name).template.stages()}
    assert len({STAGE_COLORS[stage] for stage in stages}) == len(stages)


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``python -m reports build``: exit code and stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["reports", "build", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, capsys.readouterr().err

    return call


def test_the_command_writes_the_page(command, written, tmp_path):
    out = tmp_path / "run.html"
    code, err = command("--trace", written("m"), "--trace", written("s", "simulated"), "--block", 0, "--out", out)
    assert (code, err.split(" (")[0]) == (0, f"wrote {out}")
    assert "Timeline of block 0" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trace", "t.json", "--context", "64"], "--context says more about the page of --runs: --trace does not"),
        (["--exhibits", "--block", "1"], "--block says more about the page of --trace: --exhibits does not read it"),
        (["--hardware", "h"], "give --runs or --exhibits too"),
        (["--trace", "t.json", "--exhibits"], "--trace and --exhibits are separate pages: give one of them"),
        (["--runs", "."], "--hardware is missing"),
    ],
)
def test_an_option_that_the_page_does_not_read_is_refused(command, arguments, said):
    code, err = command(*arguments)
    assert code == 2
    assert said in err


def test_a_step_0_on_another_stream_is_part_of_its_block():
    step_0 = span(9, "select", "retrieval", 1, 20, 23)
    later = [span(2, "denoise", "main", 1, 24, 30)]
    run = Trace("measured", {}, [span(1, "denoise", "main", 0, 10, 20), step_0, *later])
    found = frames.block_spans({"a": run}, 1).set_index("stage")
    assert tuple(found.loc["select", ["start_ms", "end_ms"]]) == (0.0, 3.0)
    assert tuple(found.loc["denoise", ["start_ms", "end_ms"]]) == (4.0, 10.0)
