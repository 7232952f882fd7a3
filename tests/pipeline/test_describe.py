"""The description as text, JSON and SVG."""

import json
from xml.etree import ElementTree

import pytest

from herald_pipeline import describe, methods
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline, build


@pytest.mark.parametrize("name", methods.names())
def test_every_method_describes_itself_as_json(name: str, small_model: ModelShape) -> None:
    pipeline = build(small_model, name)
    described = json.loads(json.dumps(describe.to_dict(pipeline, 1024)))
    assert [stage["name"] for stage in described["stages"]] == [s.name for s in pipeline.template.stages()]
    assert len(described["edges"]) == len(pipeline.template.edges)
    assert all(edge["why"] for edge in described["edges"])


def test_text_names_streams_edges_and_pools(herald: Pipeline) -> None:
    text = describe.to_text(herald, 1024)
    assert "after step 1   retrieval  select x 6 layers (cpu, next rows)" in text
    assert "upload -> swap: the idle pool is complete" in text
    assert "sparse     hbm" in text


def test_svg_is_well_formed_and_draws_every_stage_and_edge(herald: Pipeline) -> None:
    root = ElementTree.fromstring(describe.to_svg(herald))
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    arrows = root.findall("{http://www.w3.org/2000/svg}path")
    assert len(boxes) == len(herald.template.stages()) + 1
    assert len(arrows) == len(herald.template.edges)
