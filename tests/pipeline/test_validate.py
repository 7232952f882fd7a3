"""The validator: shipped methods pass, every edge has a reason, and what can go wrong is named."""

from dataclasses import replace

import pytest

from herald_pipeline import methods, validate
from herald_pipeline.errors import PipelineError
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.pools import Access
from herald_pipeline.stages import Edge, Section

ALL = methods.names()


def with_template(pipeline: Pipeline, **changes: object) -> Pipeline:
    """The pipeline with its method building a changed template, so that the validator's small copy has it too."""
    original = pipeline.method.build

    def rebuild(parts):
        template, pools = original(parts)
        return replace(template, **{k: v(template) if callable(v) else v for k, v in changes.items()}), pools

    method = replace(pipeline.method, build=rebuild)
    return build(pipeline.model, method)


@pytest.mark.parametrize("name", ALL)
def test_every_shipped_method_is_free_of_hazards(name: str, small_model: ModelShape) -> None:
    validate.check(build(small_model, name))


@pytest.mark.parametrize("name", ALL)
def test_removing_any_edge_is_caught_or_reported_as_implied(name: str, small_model: ModelShape) -> None:
    pipeline = build(small_model, name)
    for edge in pipeline.template.edges:
        assert validate.edge_verdict(pipeline, edge) in ("caught", "implied")


def test_removing_the_swap_edge_names_both_launches_and_the_cell(herald: Pipeline) -> None:
    broken = with_template(herald, edges=lambda t: tuple(e for e in t.edges if e.after != "swap"))
    with pytest.raises(PipelineError, match=r"upload\[\d\] of block \d and denoise of block \d .* pool 'sparse'"):
        validate.check(broken)


@pytest.mark.parametrize("gather", ["fused", "gpu"])
@pytest.mark.parametrize("name", ["herald", "herald-no-draft", "mage-cpu", "mage-cpu-representative"])
def test_whoever_gathers_there_is_no_hazard_and_no_edge_in_vain(
    name: str, gather: str, small_model: ModelShape
) -> None:
    pipeline = build(small_model, name, gather=gather)
    validate.check(pipeline)
    for edge in pipeline.template.edges:
        assert validate.edge_verdict(pipeline, edge) in ("caught", "implied")


def test_an_edge_without_a_reason_is_refused(herald: Pipeline) -> None:
    extra = Edge("upload", "append")
    pipeline = with_template(herald, edges=lambda t: (*t.edges, extra))
    with pytest.raises(PipelineError, match="upload -> append orders nothing that needs an order"):
        validate.edge_verdict(pipeline, extra)


def test_an_implied_edge_is_reported_as_implied(herald: Pipeline) -> None:
    """append of block n - 1 precedes draft_down of block n on the d2h stream, which project waits for."""
    implied = Edge("append", "project", block_offset=1, first_only=True)
    pipeline = with_template(herald, edges=lambda t: (*t.edges, implied))
    assert validate.edge_verdict(pipeline, implied) == "implied"


def test_a_stage_that_waits_for_a_later_one_would_wait_for_ever(herald: Pipeline) -> None:
    """The draft goes down before retrieval ends, so waiting for the same block's upload cannot end."""
    launches = validate.issue(validate.shrink(herald), (3, 3), validate.BatchPolicy.LOCKSTEP)
    launches[0].after = (launches[-1].id,)
    with pytest.raises(PipelineError, match="it would wait for ever"):
        next(validate.hazards(validate.shrink(herald), launches))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": (Edge("upload", "swop"),)}, "names stage 'swop', which does not exist"),
        ({"edges": (Edge("denoise", "swap"),)}, "is within stream 'main', which is in order anyway"),
        ({"streams": ()}, "is on stream 'main', which is not declared"),
    ],
)
def test_names_that_do_not_exist_are_refused(herald: Pipeline, change: dict, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        validate.check(with_template(herald, **change))


def test_an_undeclared_pool_is_refused(herald: Pipeline) -> None:
    stray = replace(herald.template.denoise, reads=(Access("spare"),))
    with pytest.raises(PipelineError, match="touches pool 'spare', which is not declared"):
        validate.check(with_template(herald, denoise=stray))


def test_a_stage_name_used_twice_is_refused(herald: Pipeline) -> None:
    twice = with_template(herald, tail=lambda t: (*t.tail, Section(t.tail[0].stages)))
    with pytest.raises(PipelineError, match="must be unique; twice: append, swap"):
        validate.check(twice)


def test_a_pipeline_whose_own_template_lost_an_edge_is_refused_though_its_method_has_it(herald: Pipeline) -> None:
    edges = tuple(edge for edge in herald.template.edges if edge.after != "swap")
    with pytest.raises(PipelineError, match="pool 'sparse'"):
        validate.check(replace(herald, template=replace(herald.template, edges=edges)))


def test_an_edge_to_a_launch_that_is_always_issued_later_would_wait_for_ever(herald: Pipeline) -> None:
    backwards = with_template(herald, edges=lambda t: (*t.edges, Edge("swap", "project")))
    with pytest.raises(PipelineError, match="edge swap -> project names: it is issued later, so 'project' would wait"):
        validate.check(backwards)


def test_a_denoise_step_that_decides_nothing_is_refused(herald: Pipeline) -> None:
    blind = replace(herald.template.denoise, decides=False)
    with pytest.raises(PipelineError, match="stage 'denoise' must decide"):
        validate.check(with_template(herald, denoise=blind))
