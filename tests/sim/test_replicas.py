"""Replicas on one host share its DRAM and nothing else."""

import pytest

from herald_pipeline import catalogue
from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.pipeline import build
from herald_pipeline.workload import Workload
from herald_sim.replicas import simulate_replicas
from herald_sim.simulate import simulate

SHAPE = catalogue.resolve("llada2-mini")


def workload(batch=8, blocks=8, context=16384):
    return Workload.uniform(context, batch, gen_tokens=32 * blocks, block_length=32, steps=20)


def pipeline(method):
    return build(SHAPE, method)


def test_one_replica_is_the_run_by_itself(paper_profile):
    found = simulate_replicas(pipeline("herald"), paper_profile, workload(), 1)
    assert found.together[0].throughput_tok_s == pytest.approx(found.alone.throughput_tok_s, rel=1e-9)
    assert found.scaling == pytest.approx(1)


@pytest.mark.parametrize("count", [2, 4])
def test_what_never_touches_dram_scales_by_the_number_of_gpus(paper_profile, count):
    found = simulate_replicas(pipeline("dense"), paper_profile, workload(), count)
    assert found.scaling == pytest.approx(count, rel=1e-6)


def test_what_dram_alone_bounds_does_not_scale(changed_profile):
    # Selection takes the whole rate of a slow memory: two take twice the time, less what one reads while the other's
    # step runs.
    slow = changed_profile("machine.dram.read_gb_s=20", "engine.select_dram_efficiency=1.0")
    found = simulate_replicas(pipeline("mage-cpu-representative"), slow, workload(), 2)
    read = found.alone.stages["select"]["busy_s"]
    both = found.together[0].stages["select"]["busy_s"]
    assert 1.9 * read < both <= 2 * read


def test_replicas_at_half_of_the_rate_each_do_not_disturb_one_another(changed_profile):
    half = changed_profile("engine.select_dram_efficiency=0.4", "engine.gather_dram_efficiency=0.05")
    found = simulate_replicas(pipeline("herald"), half, workload(), 2)
    assert found.scaling == pytest.approx(2, rel=0.01)


def test_links_are_each_replicas_own(changed_profile):
    slow = changed_profile("machine.link.h2d_gb_s=5")
    found = simulate_replicas(pipeline("layer-prefetch"), slow, workload(batch=1, blocks=2), 2)
    assert found.scaling == pytest.approx(2, rel=0.01)


def test_the_same_replicas_have_the_same_figures(paper_profile):
    first, second = (simulate_replicas(pipeline("herald"), paper_profile, workload(), 2) for _ in range(2))
    assert first.throughput_tok_s == second.throughput_tok_s
    assert first.together[0].throughput_tok_s == pytest.approx(first.together[1].throughput_tok_s, rel=0.02)


def test_host_memory_is_one_for_all(paper_profile):
    batch = 16
    one = simulate(pipeline("herald"), paper_profile, workload(batch))
    room = paper_profile.machine.dram.capacity_gb.value * 1e9
    count = int(room // one.dram_bytes) + 1
    with pytest.raises(CapacityError, match="host memory"):
        simulate_replicas(pipeline("herald"), paper_profile, workload(batch), count)


def test_no_replica_is_refused(paper_profile):
    with pytest.raises(ConfigError, match="must be >= 1, got 0"):
        simulate_replicas(pipeline("herald"), paper_profile, workload(), 0)
