"""A whole measurement of this machine on the tiny model: not for its numbers, for what it writes."""

import csv
import tomllib

import pytest

from calibration import parts
from calibration.bench import Part, Value
from calibration.measure import Request, measure
from calibration.points import Point
from calibration.procedure import Runs, check_profile, reconcile_here
from calibration.profile_file import Stamp, merge, raw_folder, write
from calibration.reference import read_reference
from calibration.timing import Plan
from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import LinkKind, Provenance

# One worker has them all: the machine is measured once.
pytestmark = pytest.mark.xdist_group("measurement")
FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)
STAMP = Stamp("python -m calibration measure", "2026-01-31", "python 3.11")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "here.toml"
    said = []
    measure(
        Request(catalogue.get("tiny"), out=out, quick=True, plan=FAST, command="python -m calibration x"), said.append
    )
    return out, said


@pytest.mark.timeout(300)
def test_a_measured_profile_is_complete_for_every_stage_of_herald_and_dense(measured):
    out, _ = measured
    points = [Point("dense", 1024, 1), Point("herald", 1024, 1), Point("mage-cpu", 1024, 1)]
    check_profile(hardware_io.resolve(out), points, catalogue.get("tiny"))


def test_every_measured_number_says_how_and_when_it_was_obtained(measured):
    out, _ = measured
    profile = hardware_io.resolve(out)
    found = [quantity.origin for _, _, quantity in profile.quantities() if quantity is not None]
    assert {origin.provenance for origin in found} == {Provenance.MEASURED, Provenance.DATASHEET}
    for origin in found:
        if origin.provenance is Provenance.MEASURED:
            assert origin.command == "python -m calibration x"
            assert origin.date
            assert "torch" in origin.software


def test_a_machine_without_a_gpu_says_what_plays_the_gpu_and_the_link(measured):
    out, _ = measured
    profile = hardware_io.resolve(out)
    assert profile.machine.gpu.emulated
    assert profile.machine.link.kind is LinkKind.MEMCPY
    assert any("core(s) play the GPU" in note for note in profile.notes)


def test_raw_tables_with_every_sample_lie_beside_the_profile(measured):
    out, _ = measured
    names = {path.stem for path in raw_folder(out).glob("*.csv")}
    # A dense model has no experts, so grouped products have no table; nor has the load of a device that is not there.
    assert names == {*parts.NAMES, "reference"} - {"grouped-gemm", "load"}
    with (raw_folder(out) / "selection.csv").open(encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    assert len(row["all_seconds"].split()) == int(row["samples"]) == FAST.repeats
    assert row["warmup"] == "1"


def test_the_time_of_the_reference_is_kept(measured):
    out, _ = measured
    assert read_reference(raw_folder(out)).seconds > 0


def test_progress_names_every_part(measured):
    _, said = measured
    assert [line.split()[0] for line in said[: len(parts.NAMES)]] == list(parts.NAMES)


def test_one_part_is_measured_anew_and_the_rest_stays(measured, tmp_path):
    out, _ = measured
    copy = tmp_path / "copy.toml"
    copy.write_text(out.read_text(encoding="utf-8").replace("calibration x", "calibration old"), encoding="utf-8")
    request = Request(catalogue.get("tiny"), out=copy, only=("sampler",), quick=True, plan=FAST, command="new")
    measure(request, lambda _: None)
    data = tomllib.loads(copy.read_text(encoding="utf-8"))
    engine = data["engines"]["herald-exec"]
    assert engine["sampler_passes"]["command"] == "new"
    assert engine["gemm_efficiency"]["command"] == "python -m calibration old"


def test_an_unknown_part_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match="--only sampling: unknown part; did you mean 'sampler'"):
        measure(Request(catalogue.get("tiny"), only=("sampling",)), lambda _: None)


def test_samples_that_disagree_are_refused_and_no_profile_is_written(tmp_path, monkeypatch):
    def refusing(_bench):
        raise ProfileError("gemm: spread 80% ...; samples: 1 ms, 9 ms")

    def nothing(_bench):
        return Part("x")

    monkeypatch.setattr("calibration.running.reference_seconds", lambda *_, **__: 0.01)
    monkeypatch.setattr(parts, "get", lambda name: refusing if name == "gemm" else nothing)
    out = tmp_path / "p.toml"
    with pytest.raises(ProfileError, match=r"was not written, because samples disagree(.|\n)*\ngemm: gemm: spread 80%"):
        measure(Request(catalogue.get("tiny"), out=out, plan=FAST), lambda _: None)
    assert not out.exists()


def test_a_missing_curve_fails_before_anything_runs_and_names_what_measures_it(measured, tmp_path, monkeypatch):
    out, _ = measured
    data = tomllib.loads(out.read_text(encoding="utf-8"))
    del data["engines"]["herald-exec"]["gather_dram_efficiency"]
    broken = tmp_path / "broken.toml"
    write(broken, data, [])
    monkeypatch.setattr("calibration.procedure.measure_points", lambda *_, **__: pytest.fail("a run began"))
    with pytest.raises(ProfileError) as refused:
        reconcile_here(broken, catalogue.get("tiny"), tmp_path / "runs", Runs([Point("herald", 1024, 1)]))
    assert "engines.herald-exec.gather_dram_efficiency" in str(refused.value)
    assert "calibration measure --only gather" in str(refused.value)


def test_a_quantity_of_the_wrong_unit_never_reaches_the_file(tmp_path):
    part = Part("dram", [Value("machine.dram.read_gb_s", "MB/s", 20.0)])
    out = tmp_path / "p.toml"
    base = {"name": "x", "engine": "herald-exec", "machine": {}}
    with pytest.raises(ConfigError, match=r"machine\.dram\.read_gb_s\.unit must be 'GB/s', got 'MB/s'"):
        write(out, merge(base, [part], STAMP), [])
    assert not out.exists()


@pytest.mark.timeout(300)
def test_the_whole_procedure_leaves_runs_report_traces_and_both_profiles(measured, tmp_path, monkeypatch):
    monkeypatch.setattr("calibration.procedure.AGAIN", FAST)
    out, _ = measured
    points = [
        Point("dense", 64, 1, set="fit"),
        Point("dense", 64, 2, set="fit"),
        Point("dense", 256, 1, set="fit"),
        Point("herald", 128, 1),
    ]
    folder = tmp_path / "runs"
    runs = Runs(points, rounds=2, again=True)
    outcome = reconcile_here(out, catalogue.get("tiny"), folder, runs, say=lambda _: None)
    assert [report.point for report in outcome.report.points] == points
    assert {report.throughput.runs for report in outcome.report.points} == {2}
    assert all(report.throughput.uncertainty > 0 for report in outcome.report.points)
    assert all(report.throughput.predicted_spread is not None for report in outcome.report.points)
    assert any("measured before and after the runs" in note for note in outcome.report.notes)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"runs.csv", "reconcile.json", "traces", "profile.toml", "again.toml"}
    hardware_io.resolve(folder / "profile.toml")
    stems = {path.name for path in (folder / "traces").iterdir()}
    assert {"herald_128x1.measured.trace.json.gz", "herald_128x1.simulated.trace.json.gz"} <= stems
