"""Requests of unequal length: what those that run at once take, and the room that admission has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import capacity, catalogue
from herald_pipeline.errors import CapacityError
from herald_pipeline.memory import Memory
from herald_pipeline.pipeline import build
from herald_pipeline.pools import Home
from herald_pipeline.room import admission_room, held, pool_bytes_held
from herald_pipeline.scheduling.admission import Admission, Request
from herald_pipeline.workload import RequestSpec, Workload

TINY = catalogue.get("tiny")
AMPLE = Memory(1e12, 1e12, 1e12)
PIPELINES = [build(TINY, name) for name in ("dense", "herald", "mage-offload")]
ENTRY_BYTES = 2 * TINY.num_kv_heads * TINY.head_dim * 2
"""Keys and values of one position in one layer, bf16."""


def workload(lengths, batch):
    return Workload(tuple(RequestSpec(i, *each) for i, each in enumerate(lengths)), batch)


@given(st.sampled_from(PIPELINES), st.integers(1, 60), st.integers(1, 9))
def test_requests_of_one_length_take_what_their_batch_takes(pipeline, blocks, batch):
    found = held(pipeline, [32 * blocks] * batch, batch, AMPLE)
    assert [item.num_bytes for item in found.items] == pytest.approx(
        [item.num_bytes for item in capacity.budget(pipeline, 32 * blocks, batch, AMPLE).items]
    )


def test_each_request_keeps_the_kv_of_its_own_length():
    found = held(build(TINY, "mage-offload"), [3200, 320, 64], 3, AMPLE)
    full = next(item for item in found.items if item.name == "full")
    assert full.num_bytes == (3200 + 320 + 64) * TINY.num_layers * ENTRY_BYTES


def test_pools_of_a_home_are_those_of_the_requests_own_lengths():
    assert pool_bytes_held(build(TINY, "dense"), [640, 64], Home.HBM) == 704 * TINY.num_layers * ENTRY_BYTES
    assert pool_bytes_held(build(TINY, "dense"), [640, 64], Home.DRAM) == 0


def test_admission_remembers_who_ran_together_when_most_did():
    admission = Admission([Request(i, 0, blocks) for i, blocks in enumerate((1, 4, 2, 2))], slots=2, block_length=32)
    admission.admit(0)
    assert admission.fullest == [(32, 128)]
    admission.finish(0)
    admission.admit(0)
    assert sorted(admission.fullest[0]) == [64, 128]
    admission.finish(1)
    admission.admit(0)
    # Two of 64 are neither more tokens nor more requests.
    assert [sum(sizes) for sizes in admission.fullest] == [192]


def test_few_long_requests_and_many_short_ones_both_count_as_full():
    requests = [Request(0, 0, 9), *[Request(i, 0, 1, arrival_ns=5) for i in (1, 2, 3)]]
    admission = Admission(requests, slots=3, block_length=32)
    admission.admit(0)
    admission.finish(*admission.running)
    admission.admit(5)
    assert sorted(admission.fullest) == [(32, 32, 32), (288,)]


def test_where_not_one_request_can_be_served_the_smallest_and_the_room_are_named():
    pipeline = build(TINY, "herald")
    with pytest.raises(CapacityError, match=r"none of the 2 request\(s\) can be served: the smallest takes 96 posit"):
        admission_room(pipeline, workload([(64, 32), (4000, 32)], 1), Memory(1e12, 1e12, 5e4))


def test_where_fewer_slots_would_serve_a_request_their_number_is_named_and_does():
    pipeline, lengths = build(TINY, "dense"), [(640, 32), (1280, 32)]
    needed = capacity.budget(pipeline, 672, 3, AMPLE)
    total = needed.total(Home.HBM, transient=False) - 2 * pool_bytes_held(pipeline, [672], Home.HBM)
    memory = Memory(total, 1e12, 1e12)
    with pytest.raises(CapacityError, match="take fewer slots: --batch 3"):
        admission_room(pipeline, workload(lengths, 9), memory)
    assert admission_room(pipeline, workload(lengths, 3), memory) >= 672
