"""Profiles: what is stated, what is refused, what is missing; messages name path, value, rule and remedy."""

import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import hardware, hardware_io
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import Curve, Number, Origin, Provenance
from herald_pipeline.hardware_ranges import check_ranges

H100 = "h100-sxm-80g_xeon-8481c"
EVERYTHING = ("select", "gather", "copy", "experts", "streamed", "scattered", "proxy")


@pytest.fixture
def edited(tmp_path):
    """The shipped profile with one text replaced, as a file."""

    def write(old, new):
        text = (hardware_io.profile_dir() / f"{H100}.toml").read_text()
        assert text.count(old) == 1, old
        path = tmp_path / "edited.toml"
        path.write_text(text.replace(old, new))
        return path

    return write


def test_the_paper_machine_is_complete_for_every_method():
    hardware_io.resolve(H100).check_complete(EVERYTHING)


@pytest.mark.parametrize("name", hardware_io.names())
def test_a_shipped_profile_holds_at_most_thirteen_fitted_numbers(name):
    profile = hardware_io.resolve(name)
    assert len(profile.fitted()) <= 13
    assert all(quantity.origin.pinned_by for quantity in profile.fitted().values())


@pytest.mark.parametrize("name", hardware_io.names())
def test_no_number_of_a_shipped_profile_is_keyed_by_model_method_or_context(name):
    text = (hardware_io.profile_dir() / f"{name}.toml").read_text()
    sections = {"machine": hardware.SECTIONS, "fitted": None}
    data = tomllib.loads(text)
    assert set(data["machine"]) <= set(sections["machine"])
    for path in data.get("fitted", {}):
        root, _, key = path.partition(".")
        assert key.rpartition(".")[2] in {*hardware.specs(hardware.Engine), "h2d_gb_s", "d2h_gb_s"}, path
        assert root in ("machine", "engines")


@pytest.mark.parametrize("name", hardware_io.names())
def test_every_number_of_a_shipped_profile_says_where_it_comes_from(name):
    for path, _, quantity in hardware_io.resolve(name).quantities():
        if quantity is not None:
            origin = quantity.origin
            assert origin.source or origin.command or origin.pinned_by or origin.same_as, path


def test_a_link_400_times_too_fast_is_refused_with_key_value_and_peak():
    with pytest.raises(ConfigError) as error:
        hardware_io.resolve(H100, overrides=["machine.link.h2d_gb_s=12500"])
    message = str(error.value)
    assert "machine.link.h2d_gb_s = 12500 GB/s is above the raw rate of PCIe 4 x16, 32.0 GB/s" in message
    assert "31.5 GB/s after line coding" in message


@pytest.mark.parametrize(
    ("generation", "rate", "outcome"),
    [
        (4, 31.5, "ok"),
        (4, 31.8, "warned"),
        (4, 32.1, "refused"),
        (5, 63.0, "ok"),
        (5, 63.5, "warned"),
        (5, 64.1, "refused"),
    ],
)
def test_link_rates_are_held_against_the_lane_rate_of_the_generation(generation, rate, outcome):
    overrides = [f"machine.link.generation={generation}", f"machine.link.h2d_gb_s={rate}", "machine.link.d2h_gb_s=20"]
    if outcome == "refused":
        with pytest.raises(ConfigError, match=f"PCIe {generation} x16"):
            hardware_io.resolve(H100, overrides=overrides)
    else:
        warnings = hardware_io.resolve(H100, overrides=overrides).warnings
        assert len(warnings) == (outcome == "warned")


def test_half_the_lanes_halve_the_limit():
    with pytest.raises(ConfigError, match=r"PCIe 4 x8, 16\.0 GB/s"):
        hardware_io.resolve(H100, overrides=["machine.link.lanes=8"])


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("path", ["machine.gpu.bandwidth_gb_s", "engine.gemm_efficiency", "machine.dram.read_gb_s"])
def test_a_number_that_cannot_be_is_refused_with_its_path(path, value):
    with pytest.raises(ConfigError, match=path.removeprefix("engine.").replace(".", r"\.")):
        hardware_io.resolve(H100, overrides=[f"{path}={value}"])


def test_an_efficiency_above_one_is_refused():
    with pytest.raises(ConfigError, match="gemm_efficiency must be <= 1"):
        hardware_io.resolve(H100, overrides=["engine.gemm_efficiency=1.01"])


def test_an_override_is_marked_as_assumed_and_changes_nothing_else():
    plain = hardware_io.resolve(H100)
    changed = hardware_io.resolve(H100, overrides=["machine.dram.read_gb_s=100"])
    assert changed.machine.dram.read_gb_s.value == 100
    assert changed.machine.dram.read_gb_s.origin.provenance is Provenance.ASSUMED
    assert changed.machine.gpu == plain.machine.gpu
    assert changed.engine == plain.engine


def test_all_misspelled_overrides_are_reported_at_once_with_the_closest_path():
    with pytest.raises(ConfigError) as error:
        hardware_io.resolve(
            H100,
            overrides=["machine.lnk.h2d_gb_s=3", "engine.gemm_eficiency=.5", "batch", "machine.link.h2d_gb_s=fast"],
        )
    lines = error.value.problems
    assert len(lines) == 4
    assert "did you mean 'machine.link.h2d_gb_s'?" in lines[0]
    assert "did you mean 'engine.gemm_efficiency'?" in lines[1]
    assert "write path=value" in lines[2]
    assert "must be a number in GB/s, got 'fast'" in lines[3]


def test_unknown_keys_of_a_file_are_all_reported_with_path_and_closest_key(edited):
    path = edited("cores = 52", "cores = 52\nthraeds = 4\ntotally_bogus_key = 42")
    with pytest.raises(ConfigError) as error:
        hardware_io.resolve(path)
    lines = error.value.problems
    assert any("machine.cpu.thraeds: unknown key; did you mean 'threads'?" in line for line in lines)
    assert any("machine.cpu.totally_bogus_key: unknown key" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("machine = 3", "machine must be a table, got 3"),
        ("engines = []", r"engines must be a table, got \[\]"),
        ("fitted = 1", "fitted must be a table, got 1"),
        ("name = 7", "name must be text, got 7"),
        ("notes = 'x'", "notes must be a list of texts, got 'x'"),
        ("[machine]\ngpu = 1", r"machine\.gpu must be a table, got 1"),
        ("[engines]\nmine = 1", r"engines\.mine must be a table, got 1"),
    ],
)
def test_a_file_of_another_form_is_refused_without_a_traceback(tmp_path, text, message):
    path = tmp_path / "odd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        hardware_io.resolve(path)


def test_an_unknown_section_or_top_key_is_refused(edited):
    path = edited("[machine.dram]", "[machine.dramm]\n[machine.dram]")
    with pytest.raises(ConfigError, match=r"machine\.dramm: unknown section; did you mean 'dram'"):
        hardware_io.resolve(path)
    path = edited('engine = "sglang-paper"', 'engine = "sglang-paper"\nengin = 3')
    with pytest.raises(ConfigError, match="engin: unknown key; did you mean 'engine'"):
        hardware_io.resolve(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'value = 3350, unit = "GB/s"',
            'value = 3350, unit = "TB/s"',
            r"bandwidth_gb_s\.unit must be 'GB/s', got 'TB/s'",
        ),
        (
            'value = 936, unit = "GB", provenance = "published"',
            'value = 936, unit = "GB"',
            "capacity_gb.provenance is missing",
        ),
        (
            'value = 936, unit = "GB", provenance = "published"',
            'value = 936, unit = "GB", provenance = "guessed"',
            "guessed",
        ),
        (
            'value = 936, unit = "GB", provenance = "published"',
            'value = 936, unit = "GB", provenance = "measured"',
            "capacity_gb.command is missing",
        ),
        (
            'value = 936, unit = "GB", provenance = "published"',
            'value = 936, unit = "GB", pinned_by = "x", provenance = "fitted"',
            r"stand in the \[fitted\] table",
        ),
        ('value = 936, unit = "GB"', 'value = "much", unit = "GB"', "capacity_gb.value.*got 'much'"),
        ("capacity_gb = { value = 936", "capacity_gb = 936 #", "every number says where it comes from"),
        ('same_as = "h2d_gb_s"', 'same_as = "h2d"', "no quantity 'h2d' here; did you mean 'h2d_gb_s'"),
        ("generation = 4", "generation = 9", r"link\.generation.*got 9"),
        ('kind = "pcie"', 'kind = "isa"', r"link\.kind.*got 'isa'"),
    ],
)
def test_what_a_file_states_wrongly_is_named(edited, old, new, message):
    with pytest.raises(ConfigError, match=message):
        hardware_io.resolve(edited(old, new))


def test_a_file_with_fourteen_fitted_numbers_is_refused(edited):
    quantities = (("machine.link.duplex_gb_s", "GB/s"), ("engines.sglang-paper.runtime_gb", "GB"))
    extra = "".join(
        f'[fitted."{path}"]\nvalue = 40\nunit = "{unit}"\npinned_by = "nothing"\n' for path, unit in quantities
    )
    path = edited("# All fitted numbers.", f"{extra}# All fitted numbers.")
    with pytest.raises(ConfigError, match="14 numbers; a profile may hold at most 13"):
        hardware_io.resolve(path)


def test_a_fitted_number_that_points_nowhere_is_refused(edited):
    path = edited('[fitted."engines.sglang-paper.sampler_passes"]', '[fitted."engines.sglang.sampler_passes"]')
    with pytest.raises(ConfigError, match="names no section of this file"):
        hardware_io.resolve(path)


def test_a_missing_number_is_named_with_what_measures_it_and_which_profiles_are_complete(edited):
    path = edited("read_gb_s = { value = 307.2", "# { value = 307.2")
    profile = hardware_io.resolve(path)
    with pytest.raises(ProfileError) as error:
        profile.check_complete(["select"], hardware_io.complete_names(["select"]))
    message = str(error.value)
    assert "machine.dram.read_gb_s: `python -m calibration measure --only dram` measures it" in message
    assert H100 in message.splitlines()[-1]


def test_a_number_that_the_run_does_not_read_may_be_missing(edited):
    path = edited("read_gb_s = { value = 307.2", "# { value = 307.2")
    hardware_io.resolve(path).check_complete(["copy", "experts"])


def curve_file(edited, table):
    return edited('h2d_gb_s = { value = 27.68, unit = "GB/s"', f'h2d_gb_s = {{ {table}, unit = "GB/s"')


def test_a_curve_stands_wherever_a_number_does(edited):
    path = curve_file(edited, 'x = [1e4, 1e6, 1e8], y = [2.0, 12.0, 27.0], x_unit = "B"')
    rate = hardware_io.resolve(path).machine.link.h2d_gb_s
    assert rate.at(1e5).value == pytest.approx(7.0)
    assert rate.peak == 27.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('x = [1, 2], yy = [1.0, 2.0], x_unit = "B"', "h2d_gb_s.yy: unknown key; did you mean 'y'"),
        ('x = [1, 2], y = [1.0], x_unit = "B"', "y"),
        ('x = [1, 2], y = [1.0, 2.0, 3.0], x_unit = "B"', "they must pair up"),
        ('x = [2, 1], y = [1.0, 2.0], x_unit = "B"', "must be positive and ascending"),
        ('x = [0, 1], y = [1.0, 2.0], x_unit = "B"', "must be positive and ascending"),
        ('x = [1, 2], y = [1.0, 33.0], x_unit = "B"', "above the raw rate"),
        ('x = [1, 2], y = [1.0, nan], x_unit = "B"', "finite"),
    ],
)
def test_a_curve_with_a_wrong_column_is_refused(edited, table, message):
    with pytest.raises(ConfigError, match=message):
        hardware_io.resolve(curve_file(edited, table))


MEASURED = Origin(Provenance.MEASURED, command="measure", date="2026-11-29")


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.1, 1e3)), min_size=2, unique_by=lambda p: p[0]),
    st.floats(0.5, 2e9),
)
def test_a_reading_stays_within_the_measured_values_and_says_when_it_is_extrapolated(points, x):
    xs, ys = zip(*sorted(points), strict=True)
    reading = Curve(xs, ys, "B", "GB/s", MEASURED).at(x)
    assert min(ys) - 1e-9 <= reading.value <= max(ys) + 1e-9
    assert reading.extrapolated == (not xs[0] <= x <= xs[-1])


def test_a_curve_passes_through_its_points():
    curve = Curve((1.0, 10.0, 100.0), (3.0, 1.0, 7.0), "B", "GB/s", MEASURED)
    assert [curve.at(x).value for x in curve.x] == [3.0, 1.0, 7.0]
    assert Number(5.0, "GB/s", MEASURED).at(123).value == 5.0


def test_an_engine_is_never_taken_from_another_machine_silently(tmp_path):
    other = tmp_path / "bare.toml"
    other.write_text('name = "bare"\n[machine.gpu]\nname = "x"\n')
    with pytest.raises(ProfileError, match="names no default engine"):
        hardware_io.resolve(other)
    with pytest.raises(ProfileError) as error:
        hardware_io.resolve(other, engine="sglang-paper")
    assert "never taken from another machine silently" in str(error.value)
    assert f"--engine {H100}:sglang-paper" in str(error.value)


def test_an_engine_can_be_taken_from_another_machine_on_purpose(tmp_path):
    other = tmp_path / "bare.toml"
    other.write_text('name = "bare"\n[machine.gpu]\nname = "x"\n')
    profile = hardware_io.resolve(other, engine=f"{H100}:sglang-paper")
    assert profile.engine.name == f"{H100}:sglang-paper"
    assert profile.engine.gemm_efficiency == hardware_io.resolve(H100).engine.gemm_efficiency
    with pytest.raises(ConfigError, match="did you mean 'sglang-paper'"):
        hardware_io.resolve(other, engine=f"{H100}:sglang-papr")


def test_names_and_paths_that_do_not_exist_are_told_apart():
    with pytest.raises(ConfigError, match=f"did you mean '{H100}'"):
        hardware_io.resolve("h100-sxm-80g_xeon-8481")
    with pytest.raises(ConfigError, match=r"no profile file at \./none\.toml"):
        hardware_io.resolve("./none.toml")


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("name = ")
    with pytest.raises(ConfigError, match="not a readable TOML profile"):
        hardware_io.resolve(path)


def test_the_template_of_a_machine_without_a_gpu_says_what_to_measure():
    profile = hardware_io.resolve(hardware_io.profile_dir() / "cpu-only.template.toml")
    assert profile.machine.gpu.emulated
    assert "memcpy" in profile.notes[0]
    parts = {part for _, part in profile.missing(("select", "gather", "copy"))}
    assert parts == {"memory", "attention", "gemm", "selection", "dram", "copies", "launch", "sampler", "gather"}
    assert "cpu-only.template" not in hardware_io.names()


def test_reading_shapes_and_machines_needs_neither_pydantic_nor_numpy():
    code = (
        "import sys, herald_pipeline.hardware, herald_pipeline.hardware_io, herald_pipeline.catalogue;"
        "print([m for m in ('pydantic', 'numpy', 'torch', 'simpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_curve_of_shares_is_doubted_by_what_it_rises_to() -> None:
    """Measured shares begin at next to nothing where the work is small (top-k of one row on a GPU: 9e-6)."""
    measured = hardware_io.resolve("h200-141g_emr-16vcpu")
    assert not [warning for warning in check_ranges(measured) if "top_k_efficiency" in warning]
