"""Whose kernels get a multiprocessor first."""

import pytest

from herald_exec.models import tiny_shape
from herald_pipeline.pipeline import build


@pytest.mark.parametrize(
    ("method", "gather", "streams"),
    [
        ("step-fetch", "gpu", {"h2d"}),
        ("step-fetch", "cpu", set()),
        ("infinigen", "cpu", {"h2d"}),
        ("herald", "gpu", set()),
    ],
)
def test_rows_that_a_step_waits_for_go_before_its_next_kernels(method, gather, streams):
    """Not HERALD's, which are for the next block; and where the CPU gathers a copy engine moves them."""
    pipeline = build(tiny_shape(), method, gather=gather)
    first = {stream.name for stream in pipeline.template.streams if stream.high_priority}
    assert first - {"retrieval"} == streams
