"""The public entry: found under its name however the package was imported, and never fooled by a method's name."""

import subprocess
import sys
from dataclasses import replace

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.errors import PipelineError
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim import simulate

ORDERS = (
    "from herald_sim import simulate",
    "from herald_sim.simulate import simulate; from herald_sim import simulate",
    "import herald_sim.simulate; from herald_sim import simulate",
)


@pytest.mark.parametrize("statements", ORDERS)
def test_simulate_is_the_function_however_it_is_imported(statements):
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}; print(type(simulate).__name__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "function"


def test_a_changed_method_is_validated_though_one_of_its_name_has_run():
    profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
    workload = Workload.uniform(1024, 2, gen_tokens=96)
    whole = build(catalogue.get("tiny"), "herald")
    assert simulate(whole, profile, workload).finished == 2
    edges = tuple(edge for edge in whole.template.edges if edge.after != "swap")
    with pytest.raises(PipelineError, match="in no order"):
        simulate(replace(whole, template=replace(whole.template, edges=edges)), profile, workload)
