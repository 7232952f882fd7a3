"""Fig. 6 and Fig. 8 as measured: what the page says follows from the file of kernel speeds, and from nothing else."""

import json
import statistics
from pathlib import Path

import pytest

from herald_pipeline.errors import ConfigError
from reports import cli, kernels
from reports.charts import kernels as charts

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "kernels_emr-16vcpu_32768.json"


def entry(name, tier, x, samples):
    rate = statistics.median(samples)
    work = {"flop_per_byte": 4.0 * x, "gflops": 4 * x * rate, "of_read_ceiling": rate / 100}
    return {"name": name, "tier": tier, "x": x, "gb_s_samples": samples, "gb_s": rate, **work}


@pytest.fixture
def bench():
    """Two rounds; the machine was twice as fast in the second."""
    return {
        "cpu": "test",
        "shape": {"context": 32768},
        "read_gb_s": {"1": {"median": 10.0}, "16": {"median": 100.0}},
        "roofs_gflops": {"avx512bf16": {"harmonic_bf16_dot_fma": 3000.0}, "avx512": {"fma": 2000.0}},
        "kernels": [
            entry("avx512 x=1", "avx512", 1, [80.0, 160.0]),
            entry("avx512 x=32", "avx512", 32, [10.0, 20.0]),
            entry("avx512 x=1, prefetch 0", "avx512", 1, [1.0, 1.0]),
        ],
    }


def test_gains_are_ratios_within_a_round_and_variants_stay_out(bench):
    frame = charts.kernel_frame(bench).set_index("queries")
    assert list(frame["gain"]) == [8.0, 1.0]


def test_ridges_are_roofs_over_what_all_threads_read(bench, tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(bench))
    roofline, _ = kernels.sections(path)
    assert "bf16 dots and FMA (paper): 30; FP32 FMA: 20. Printed: 26 to 35" in roofline.caption


@pytest.mark.parametrize("section", kernels.sections(FILE), ids=["fig-6", "fig-8"])
def test_charts_of_the_shipped_file_are_valid_json_that_names_it(section):
    spec = section.chart.to_dict()
    assert FILE.name in spec["title"]["subtitle"]
    json.dumps(spec, allow_nan=False)


def test_one_query_has_4_flop_a_byte_and_32_have_128():
    frame = charts.kernel_frame(json.loads(FILE.read_text()))
    assert (frame["intensity"] == 4 * frame["queries"]).all()


@pytest.mark.parametrize("text", ["", "[]", '{"kernels": []}'])
def test_a_file_of_something_else_is_refused_by_name_or_by_what_it_lacks(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json|roofs_gflops"):
        kernels.sections(path)


def test_measured_kernels_belong_to_the_page_of_exhibits(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reports", "build", "--kernels", str(FILE)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code != 0
    assert "give --exhibits too" in capsys.readouterr().err
