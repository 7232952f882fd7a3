"""Remembered prices are those worked out anew, whatever a stage's work asks of a launch."""

from dataclasses import replace

import pytest

from herald_pipeline import methods
from herald_pipeline.errors import PipelineError
from herald_pipeline.scheduling.program import Program
from herald_pipeline.stages import LaunchShape, Op, OpKind, Section, Stage, once
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel
from herald_sim.pricing import NotedShape, Pricer
from herald_sim.uncontended import issued

SHAPE = LaunchShape(2, 64, 64, 8192, 400, 64, 262144, 14848)


@pytest.mark.parametrize("method", methods.names())
def test_a_price_is_the_cost_of_the_launch_in_every_block(paper_profile, pipeline_of, method):
    pipeline = pipeline_of(method)
    costs, pricers = CostModel(pipeline, paper_profile), {}
    workload = Workload.uniform(4096, 4, gen_tokens=96, steps=3)
    for launch in issued(Program(pipeline, workload.blocked(), slots=4), 3):
        stage, layer = launch.stage, launch.layer
        pricer = pricers.setdefault((stage.name, layer), Pricer(costs.work_cost, stage, layer))
        price, anew = pricer.price(launch.shape), costs.stage_cost(stage, launch.shape, layer)
        assert [phase.total_ns for phase in price.phases] == [phase.total_ns for phase in anew.phases]
        assert (price.num_bytes, price.flops) == (anew.num_bytes, anew.flops)


def test_work_that_asks_for_other_totals_in_another_case_is_told_apart(paper_profile, pipeline_of):
    def work(shape, _layer):
        tokens = shape.prefix_tokens if shape.rows > 1 else shape.selected_tokens
        return once(Op(OpKind.COPY, h2d_bytes=float(tokens), dram_bytes=float(tokens)))

    costs = CostModel(pipeline_of("dense"), paper_profile)
    pricer = Pricer(costs.work_cost, Stage("copy", "copy", "h2d", "h2d", work), None)
    cases = [SHAPE, SHAPE._replace(rows=1), SHAPE._replace(rows=1, selected_tokens=9), SHAPE._replace(prefix_tokens=7)]
    assert [pricer.price(shape).num_bytes for shape in (*cases, *cases)] == [8192, 400, 9, 7] * 2


def test_what_is_no_total_counts_as_asking_for_all_of_them():
    noted = NotedShape(SHAPE)
    assert noted._asdict()["rows"] == 2
    assert noted.asked == set(LaunchShape._fields)


def test_a_stage_that_decides_in_the_middle_of_a_section_is_refused(pipeline_of):
    pipeline = pipeline_of("dense")
    denoise = pipeline.template.denoise
    after = replace(denoise, name="after", decides=False)
    template = replace(pipeline.template, head=(Section((replace(denoise, name="early"), after)),))
    workload = Workload.uniform(4096, 4, gen_tokens=96, steps=3)
    program = Program(replace(pipeline, template=template), workload.blocked(), slots=4)
    with pytest.raises(PipelineError, match=r"'early' decides, so it must be the last launch of its section"):
        list(issued(program, 3))
