"""Measurements that end early: what is kept, what is said, and how the same call goes on."""

import tomllib

import pytest

from calibration import cli, parts, unfinished
from calibration.bench import Part, Value
from calibration.measure import DeviceLostError, Request, measure
from calibration.profile_file import raw_folder
from calibration.timing import Plan
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError, ProfileError

FAST = Plan(warmup=1, repeats=6, more=0, sample_s=0.0, max_spread=1e6)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Three parts in place of the real ones; ``fails`` holds what each raises, ``ran`` what was called."""
    ran, fails = [], {}

    def part(name):
        def run(bench):
            ran.append(name)
            if name in fails:
                raise fails[name]
            if name == "dram":
                bench.tables["seconds"] = {2.0: 0.5}
            if name == "gemm":
                assert bench.table("seconds", "dram") == {2.0: 0.5}
            rate = {"dram": "machine.dram.read_gb_s", "gemm": "machine.gpu.bandwidth_gb_s"}.get(name)
            return Part(name, [Value(rate, "GB/s", 20.0)] if rate else [], [{"threads": 1}])

        return run

    monkeypatch.setattr(parts, "NAMES", ("dram", "gemm", "copies"))
    monkeypatch.setattr(parts, "get", part)
    return tmp_path / "p.toml", ran, fails


def request(out, **others):
    return Request(catalogue.get("tiny"), out=out, plan=FAST, **others)


def stop_in_gemm(machine):
    """A first call in which only ``gemm`` fails."""
    out, ran, fails = machine
    fails["gemm"] = MemoryError("no room")
    with pytest.raises(ProfileError):
        measure(request(out), lambda _: None)
    ran.clear()


def kept(out):
    return tomllib.loads(unfinished.path_of(out).read_text(encoding="utf-8"))


def test_what_the_other_parts_found_is_kept_where_one_fails(machine):
    out, ran, fails = machine
    fails["gemm"] = MemoryError("no room")
    with pytest.raises(ProfileError, match=r"p\.incomplete\.toml, and the same command again") as refused:
        measure(request(out), lambda _: None)
    assert ran == ["dram", "gemm", "copies"]
    assert kept(out)["machine"]["dram"]["read_gb_s"]["value"] == 20.0
    assert (raw_folder(unfinished.path_of(out)) / "dram.csv").is_file()
    assert "gemm: MemoryError: no room" in str(refused.value)


def test_the_trace_of_a_failure_is_in_a_file_and_not_on_the_screen(machine, capsys):
    out, _, fails = machine
    fails["gemm"] = MemoryError("no room")
    with pytest.raises(ProfileError, match=r"\(trace: .*gemm\.failure\.txt\)"):
        measure(request(out), lambda _: None)
    text = (raw_folder(unfinished.path_of(out)) / "gemm.failure.txt").read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "MemoryError: no room" in text
    assert "Traceback" not in capsys.readouterr().err


def test_the_same_call_again_measures_only_what_is_missing(machine):
    out, ran, fails = machine
    stop_in_gemm(machine)
    fails["gemm"] = ProfileError("samples disagree")
    said = []
    with pytest.raises(ProfileError, match="samples disagree"):
        measure(request(out), said.append)
    assert ran == ["gemm"]
    assert "going on from" in said[0]
    assert "dram, copies" in said[0]
    assert kept(out)["machine"]["dram"]["read_gb_s"]["value"] == 20.0


def test_a_later_part_reads_tables_of_an_earlier_call(machine):
    out, ran, fails = machine
    stop_in_gemm(machine)
    fails.clear()
    measure(request(out), lambda _: None)
    assert ran == ["gemm"]
    found = tomllib.loads(out.read_text(encoding="utf-8"))["machine"]
    assert (found["dram"]["read_gb_s"]["value"], found["gpu"]["bandwidth_gb_s"]["value"]) == (20.0, 20.0)
    assert not unfinished.path_of(out).exists()


def test_a_part_that_is_named_is_measured_anew_on_what_is_there(machine):
    out, ran, _ = machine
    stop_in_gemm(machine)
    with pytest.raises(ProfileError, match=r"not measured yet: gemm"):
        measure(request(out, only=("copies",)), lambda _: None)
    assert ran == ["copies"]
    assert kept(out)["machine"]["dram"]["read_gb_s"]["value"] == 20.0


def test_numbers_of_another_model_are_not_gone_on_with(machine):
    out, ran, _ = machine
    stop_in_gemm(machine)
    said = []
    with pytest.raises(ProfileError):
        measure(Request(catalogue.get("demo"), out=out, plan=FAST), said.append)
    assert ran == ["dram", "gemm", "copies"]
    assert "of another measurement" in said[0]


def test_a_lost_device_ends_the_measurement_and_names_what_was_not_begun(machine, monkeypatch):
    out, ran, fails = machine
    fails["gemm"] = RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for ...")
    monkeypatch.setattr("calibration.running._lost", lambda _bench: True)
    with pytest.raises(DeviceLostError) as refused:
        measure(request(out), lambda _: None)
    assert ran == ["dram", "gemm"]
    last = str(refused.value).splitlines()[-2:]
    assert last[0].startswith("gemm: RuntimeError: CUDA error: an illegal memory access was encountered (trace: ")
    assert last[1] == "the device answers this process no more; not begun: copies"
    assert kept(out)["machine"]["dram"]["read_gb_s"]["value"] == 20.0


def test_after_a_lost_device_the_process_ends_at_once_with_the_errors_code(monkeypatch, capsys):
    class EndedError(Exception):
        pass

    def ended(code):
        raise EndedError(code)

    def lost():
        raise DeviceLostError("p.toml was not written")

    monkeypatch.setattr(cli, "app", lost)
    monkeypatch.setattr("os._exit", ended)
    with pytest.raises(EndedError, match="1"):
        cli.main()
    assert capsys.readouterr().err == "error: p.toml was not written\n"


def test_raw_tables_of_both_calls_lie_beside_the_finished_profile(tmp_path):
    out = tmp_path / "p.toml"
    so_far = unfinished.path_of(out)
    for folder, name in ((raw_folder(so_far), "dram"), (raw_folder(so_far), "gemm"), (raw_folder(out), "gemm")):
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.csv").write_text(f"from\n{folder.name}\n", encoding="utf-8")
    so_far.write_text("", encoding="utf-8")
    unfinished.finish(so_far, out)
    found = {path.stem: path.read_text(encoding="utf-8") for path in raw_folder(out).glob("*.csv")}
    assert found == {"dram": "from\np.incomplete.raw\n", "gemm": "from\np.incomplete.raw\n"}
    assert not so_far.exists()
    assert not raw_folder(so_far).exists()


def test_progress_that_cannot_be_read_says_what_to_delete(tmp_path):
    so_far = tmp_path / "p.incomplete.toml"
    so_far.write_text("", encoding="utf-8")
    folder = raw_folder(so_far)
    folder.mkdir()
    (folder / "progress.json").write_text("[", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"delete .*p\.incomplete\.toml to begin anew"):
        unfinished.found(so_far, {}, ())
