import pytest

from herald_pipeline.workload import Workload
from herald_sim.explain import critical_path, explain


@pytest.mark.parametrize("method", ["dense", "herald", "mage-offload", "mage-cpu-representative"])
def test_the_critical_path_sums_to_the_block(paper_profile, pipeline_of, method):
    pipeline = pipeline_of(method)
    found = explain(pipeline, paper_profile, Workload.uniform(32768, 16))
    assert sum(found.path.values()) == pytest.approx(found.result.block_time_s, rel=1e-6)


def test_dense_is_all_denoising(paper_profile, pipeline_of):
    assert set(critical_path(pipeline_of("dense"), paper_profile, Workload.uniform(4096, 4, gen_tokens=96))) == {
        "denoise"
    }


def test_what_holds_a_retrieval_bound_block_is_selection(paper_profile, pipeline_of):
    path = critical_path(pipeline_of("herald"), paper_profile, Workload.uniform(32768, 80, gen_tokens=128, steps=4))
    assert max(path, key=path.get) == "select"


def test_more_of_the_resource_that_binds_helps_most_and_none_hurts(paper_profile, pipeline_of):
    few = explain(pipeline_of("herald"), paper_profile, Workload.uniform(32768, 80, steps=6))
    resources = {name: effect for name, effect in few.changes.items() if name.startswith("+10%")}
    assert max(resources, key=resources.get) == "+10% host memory bandwidth"
    assert all(effect > -1e-3 for effect in resources.values())
    dense = explain(pipeline_of("dense"), paper_profile, Workload.uniform(32768, 16))
    assert dense.changes["+10% link, host to device"] == 0
    assert dense.changes["+10% device memory bandwidth"] > 0.02
