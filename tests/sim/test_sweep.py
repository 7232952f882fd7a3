import json
import os
import time

import pytest

from herald_pipeline.errors import ConfigError
from herald_sim import sweep as sweeping
from herald_sim.text import summary_text

BASE = """
[base]
model = "llada2-mini"
hardware = "h100-sxm-80g_xeon-8481c"
context = 32768
gen_tokens = 96
"""


def grid(tmp_path, text):
    path = tmp_path / "grid.toml"
    path.write_text(BASE + text)
    return path


def test_points_are_every_combination_with_dotted_parameters(tmp_path):
    points = sweeping.read_grid(
        grid(tmp_path, '[grid]\nmethod = ["dense", "herald"]\nbatch = [1, 2]\n"machine.link.h2d_gb_s" = [20.0, 27.0]')
    )
    assert len(points) == 8
    assert len({sweeping.point_id(point) for point in points}) == 8
    assert sweeping.options_of(points[0]).sets == ("machine.link.h2d_gb_s=20.0",)


def test_a_point_that_does_not_fit_is_marked_with_its_limit_and_never_wins(tmp_path):
    points = sweeping.read_grid(grid(tmp_path, '[grid]\nmethod = ["dense"]\nbatch = [15, 16, 17, 18]'))
    summary = sweeping.sweep(points, tmp_path / "out", sweeping.local_workers(2))
    lines = {line["parameters"]["batch"]: line for line in sweeping.read_points(tmp_path / "out" / sweeping.POINTS)}
    assert lines[15]["state"] == lines[16]["state"] == "ok"
    assert lines[18]["state"] == "infeasible"
    assert "short by" in lines[18]["reason"]
    assert summary["best"]["parameters"]["batch"] == max(b for b, line in lines.items() if line["state"] == "ok")


def test_a_second_run_takes_what_is_there_and_repeats_a_line_that_was_cut_off(tmp_path):
    points = sweeping.read_grid(grid(tmp_path, '[grid]\nmethod = ["dense"]\nbatch = [1, 2]'))
    out = tmp_path / "out"
    first = sweeping.sweep(points, out, sweeping.local_workers(1))
    lines = (out / sweeping.POINTS).read_text().splitlines()
    (out / sweeping.POINTS).write_text(lines[0] + "\n" + lines[1][: len(lines[1]) // 2])
    counted = Counting()
    assert sweeping.sweep(points, out, counted) == first
    assert counted.points == 1


class Counting(sweeping.Workers):
    """Runs points in this process and counts them."""

    def __init__(self):
        self.points = 0

    def run(self, points, fast):
        for point in points:
            self.points += 1
            yield sweeping.run_point(point, fast)


def test_the_pareto_front_holds_what_no_point_beats_in_both(tmp_path):
    lines = [
        {"id": name, "parameters": {}, "state": "ok", "throughput_tok_s": rate, "block_time_s": block}
        for name, rate, block in (("a", 10, 1.0), ("b", 20, 2.0), ("c", 15, 2.5), ("d", 9, 0.9))
    ]
    lines.append({"id": "e", "parameters": {}, "state": "infeasible", "throughput_tok_s": 99, "block_time_s": 0.1})
    assert [point["id"] for point in sweeping.summarise(lines)["pareto"]] == ["d", "a", "b"]


def test_every_problem_of_a_grid_is_named_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        sweeping.read_grid(grid(tmp_path, "[grid]\nbatchsize = [80]\nbatch = 3\nkv_buget = [1]"))
    text = str(caught.value)
    for part in ("'batchsize' is no option", "'kv_buget' is no option", "batch must be a list", "method is missing"):
        assert part in text


@pytest.mark.parametrize("budget", ["nan", "0.05,-inf"])
def test_a_budget_that_is_no_number_is_refused_before_anything_runs(budget):
    with pytest.raises(ConfigError, match="--budget must be numbers with commas"):
        sweeping.points_of({"model": "tiny", "method": "herald", "hardware": "h", "budget": budget})


def test_a_number_of_a_grid_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"machine\.link\.h2d_gb_s must be finite, got nan"):
        sweeping.read_grid(grid(tmp_path, '[grid]\nmethod = ["dense"]\n"machine.link.h2d_gb_s" = [20.0, nan]'))


def test_a_comma_too_many_is_no_name():
    with pytest.raises(ConfigError, match="--method holds an empty name: 'dense,'"):
        sweeping.points_of({"model": "tiny", "method": "dense,", "hardware": "h"})


def test_the_summary_says_once_why_points_gave_no_figures(tmp_path):
    points = sweeping.read_grid(grid(tmp_path, '[grid]\nmethod = ["dense", "dens"]\nbatch = [1, 2]'))
    summary = sweeping.sweep(points, tmp_path / "out", Counting())
    (entry,) = summary["left_out"]
    assert (entry["state"], entry["points"]) == ("failed", 2)
    assert "failed: unknown method 'dens'; did you mean 'dense'? (2 points), the first: " in summary_text(summary)


def kill_worker(point, fast):
    """Stands for a point whose native code crashes."""
    if point["batch"] == 2:
        time.sleep(0.2)
        os._exit(9)
    return {
        "id": sweeping.point_id(point),
        "parameters": point,
        "state": "ok",
        "throughput_tok_s": 1.0,
        "block_time_s": 1,
    }


def test_a_killed_worker_is_one_failed_point_and_the_others_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeping, "run_point", kill_worker)
    points = [{"batch": batch} for batch in range(6)]
    summary = sweeping.sweep(points, tmp_path / "out", sweeping.local_workers(2))
    assert (summary["ok"], summary["failed"]) == (5, 1)
    failed = [line for line in sweeping.read_points(tmp_path / "out" / sweeping.POINTS) if line["state"] == "failed"]
    assert failed[0]["parameters"] == {"batch": 2}
    assert "BrokenProcessPool" in failed[0]["reason"]


@pytest.mark.filterwarnings("ignore")
def test_a_real_dask_cluster_gives_the_same_lines(tmp_path):
    distributed = pytest.importorskip("distributed")
    points = sweeping.read_grid(grid(tmp_path, '[grid]\nmethod = ["dense"]\nbatch = [1, 18]'))
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None, processes=False
    ) as cluster:
        over_dask = sweeping.sweep(points, tmp_path / "dask", sweeping.dask_workers(cluster.scheduler_address))
    local = sweeping.sweep(points, tmp_path / "local", Counting())
    assert json.dumps(over_dask) == json.dumps(local)


def test_an_address_without_a_scheduler_is_refused(monkeypatch):
    distributed = pytest.importorskip("distributed")
    client = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda address, timeout, **rest: client(address, timeout="1s", **rest))
    with pytest.raises(ConfigError, match="no dask scheduler"):
        sweeping.dask_workers("tcp://127.0.0.1:1")
