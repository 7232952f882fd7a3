"""The program: order of issue, who takes part, what waits for what, under both batch policies."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_pipeline import methods
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.scheduling.admission import Request
from herald_pipeline.scheduling.launches import Feedback, Idle, Launch
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.stages import Mode

SMALL = ModelShape("small", "sdar", 6, 64, 4, 2, 16, 128, 100)


def run(
    pipeline: Pipeline,
    steps: dict[int, list[int]],
    *,
    policy: BatchPolicy = BatchPolicy.LOCKSTEP,
    slots: int = 2,
    contexts: dict[int, int] | None = None,
    arrivals: dict[int, int] | None = None,
    **options: object,
) -> tuple[list[Launch], Program]:
    """Issue everything; ``steps[request]`` lists the denoise steps of each of its blocks."""
    contexts, arrivals = contexts or {}, arrivals or {}
    requests = [Request(r, contexts.get(r, 64), len(t), arrivals.get(r, 0)) for r, t in steps.items()]
    program = Program(pipeline, requests, slots=slots, policy=policy, **options)
    done: Counter[tuple[int, int]] = Counter()
    launches: list[Launch] = []
    generator = program.launches()
    feedback = None
    clock = 0
    try:
        while True:
            item = generator.send(feedback)
            feedback = None
            if isinstance(item, Idle):
                clock = item.until_ns
                continue
            launches.append(item)
            if item.stage.decides:
                masked = set()
                for group in item.groups:
                    for slot, block in zip(group.slots, group.blocks, strict=True):
                        request = program.admission.running[slot].id
                        done[request, block] += 1
                        if done[request, block] < steps[request][block]:
                            masked.add(slot)
                feedback = Feedback(frozenset(masked), now_ns=clock)
    except StopIteration:
        return launches, program


def names(launches: list[Launch], block: int = 0) -> list[str]:
    return [launch.stage.name for launch in launches if launch.block == block]


def test_fixed_steps_make_t_plus_1_forwards_a_block() -> None:
    launches, _ = run(build(SMALL, "dense"), {0: [3], 1: [3]})
    modes = [launch.groups[0].mode for launch in launches if launch.stage.name == "denoise"]
    assert modes == [Mode.DENOISE, Mode.DENOISE, Mode.DENOISE, Mode.COMPLETE]


def test_step_1_of_herald_carries_the_draft_group() -> None:
    launches, _ = run(build(SMALL, "herald"), {0: [3, 3], 1: [3, 3]})
    steps = [launch for launch in launches if launch.stage.name == "denoise" and launch.block == 0]
    assert [step.groups[0].mode for step in steps] == [Mode.DENOISE, Mode.DRAFT, Mode.DENOISE, Mode.COMPLETE]
    assert [step.shape.tokens for step in steps] == [64, 128, 64, 64]


def test_a_row_complete_after_step_0_is_its_own_draft() -> None:
    launches, _ = run(build(SMALL, "herald"), {0: [1, 1], 1: [3, 1]})
    step_1 = [launch for launch in launches if launch.stage.name == "denoise"][1]
    assert [(group.slots, group.mode) for group in step_1.groups] == [((1,), Mode.DRAFT), ((0,), Mode.COMPLETE_DRAFT)]


def test_the_last_block_has_no_retrieval() -> None:
    launches, _ = run(build(SMALL, "herald"), {0: [2, 2], 1: [2, 2]})
    assert "select" in names(launches, block=0)
    assert "select" not in names(launches, block=1)


def test_a_run_that_continues_retrieves_in_its_last_block_too() -> None:
    pipeline = build(SMALL, "herald")
    program = Program(pipeline, [Request(0, 64, 1, continues=True)], slots=1)
    generator = program.launches()
    seen = []
    feedback = None
    try:
        while True:
            item = generator.send(feedback)
            seen.append(item.stage.name)
            feedback = Feedback(False) if item.stage.decides else None
    except StopIteration:
        pass
    assert "select" in seen


def test_retrieval_is_issued_layer_by_layer_without_finish_of_the_last_layer() -> None:
    launches, _ = run(build(SMALL, "herald"), {0: [3, 3], 1: [3, 3]})
    passes = [(x.stage.name, x.layer) for x in launches if x.block == 0 and x.layer is not None]
    assert passes[:6] == [("project", 0), ("select", 0), ("finish", 0), ("project", 1), ("select", 1), ("finish", 1)]
    assert passes[6:11] == [("project", 2), ("select", 2), ("finish", 2), ("gather", 2), ("upload", 2)]
    assert ("finish", 5) not in passes


def test_gather_waits_for_its_own_layers_indices_and_for_the_rings_place() -> None:
    launches, _ = run(build(SMALL, "herald"), {0: [3, 3], 1: [3, 3]})
    block = [launch for launch in launches if launch.block == 0]
    by_place = {(launch.stage.name, launch.layer): launch.id for launch in block}
    gather = next(launch for launch in block if launch.stage.name == "gather" and launch.layer == 4)
    assert set(gather.after) == {by_place["select", 4], by_place["upload", 2]}


def test_lockstep_rows_wait_for_the_slowest() -> None:
    launches, _ = run(build(SMALL, "dense"), {0: [1, 1], 1: [4, 1]})
    rows = [launch.shape.rows for launch in launches if launch.stage.name == "denoise"]
    assert rows == [2, 2, 1, 1, 1, 2, 2]


def test_first_done_first_out_rows_do_not_wait() -> None:
    launches, _ = run(build(SMALL, "dense"), {0: [1, 1], 1: [4, 1]}, policy=BatchPolicy.FIRST_DONE_FIRST_OUT)
    rows = [launch.shape.rows for launch in launches if launch.stage.name == "denoise"]
    # Row 0 needs 2 + 2 forwards, row 1 needs 5 + 2.
    assert rows == [2, 2, 2, 2, 1, 1, 1]


def test_a_free_slot_is_reused_at_the_block_boundary() -> None:
    launches, program = run(build(SMALL, "dense"), {0: [2], 1: [2], 2: [2]}, slots=2)
    assert program.admission.finished == [0, 1, 2]
    assert {slot for launch in launches for group in launch.groups for slot in group.slots} == {0, 1}


def test_nothing_is_issued_before_a_request_arrives() -> None:
    launches, program = run(build(SMALL, "dense"), {0: [1], 1: [1]}, arrivals={1: 5_000}, slots=1)
    assert program.admission.finished == [0, 1]
    assert len([launch for launch in launches if launch.stage.name == "denoise"]) == 4


def test_a_request_larger_than_the_pool_is_rejected_once_and_the_others_finish() -> None:
    steps = {request: [1] for request in range(10)}
    _, program = run(build(SMALL, "dense"), steps, contexts={4: 880}, kv_tokens=800)
    assert list(program.admission.rejected) == [4]
    assert "take 928 positions in blocks of" in program.admission.rejected[4]
    assert len(program.admission.finished) == 9


def test_a_stopped_row_frees_its_slot() -> None:
    program = Program(build(SMALL, "dense"), [Request(0, 64, 5)], slots=1)
    generator = program.launches()
    feedback, count = None, 0
    try:
        while True:
            item = generator.send(feedback)
            count += item.stage.decides
            feedback = Feedback(False, stopped=frozenset({0})) if item.stage.decides else None
    except StopIteration:
        pass
    assert count == 2
    assert program.admission.finished == [0]


def test_selected_tokens_are_those_of_the_block_that_selected() -> None:
    """Budget .25, context 64: block 0 reads k(64) = 16; block 1 what block 0 chose from 64, and a tail of 32."""
    launches, _ = run(build(SMALL, "herald", budget=0.25), {0: [2, 2, 2], 1: [2, 2, 2]})
    steps = {launch.block: launch.shape for launch in launches if launch.stage.name == "denoise"}
    assert [(steps[b].selected_tokens, steps[b].tail_tokens) for b in range(3)] == [(32, 0), (32, 64), (48, 64)]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(methods.names()),
    policy=st.sampled_from(list(BatchPolicy)),
    slots=st.integers(1, 4),
    steps=st.dictionaries(
        st.integers(0, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5
    ),
)
def test_every_request_ends_and_each_row_forwards_t_plus_1_times(
    name: str, policy: BatchPolicy, slots: int, steps: dict[int, list[int]]
) -> None:
    launches, program = run(build(SMALL, name), steps, policy=policy, slots=slots)
    assert sorted(program.admission.finished) == sorted(steps)
    forwards = sum(launch.shape.rows for launch in launches if launch.stage.decides)
    assert forwards == sum(t + 1 for blocks in steps.values() for t in blocks)
    assert [launch.id for launch in launches] == list(range(len(launches)))
    assert all(source < launch.id for launch in launches for source in launch.after)


@pytest.mark.parametrize("policy", list(BatchPolicy))
def test_completed_blocks_are_appended_once_each(policy: BatchPolicy) -> None:
    steps = {0: [2, 1, 3], 1: [1, 4, 1], 2: [3, 3, 3]}
    launches, _ = run(build(SMALL, "herald"), steps, policy=policy, slots=3)
    appended = [
        (slot, block)
        for launch in launches
        if launch.stage.name == "append"
        for group in launch.groups
        for slot, block in zip(group.slots, group.blocks, strict=True)
    ]
    assert sorted(appended) == [(slot, block) for slot in range(3) for block in range(3)]


def test_a_layered_step_issues_all_layers_before_it_decides() -> None:
    launches, _ = run(build(SMALL, "layer-prefetch"), {0: [2], 1: [2]})
    decode = [launch for launch in launches if launch.block == 0]
    step = [(launch.stage.name, launch.layer) for launch in decode][:13]
    assert step == [(name, layer) for layer in range(6) for name in ("fetch", "step_layer")] + [("decide", None)]
    assert sum(launch.stage.name == "decide" for launch in decode) == 3


def test_a_leading_stage_is_issued_one_layer_ahead() -> None:
    launches, _ = run(build(SMALL, "step-fetch"), {0: [1], 1: [1]})
    order = [(launch.stage.name, launch.layer) for launch in launches if launch.block == 0]
    assert order.index(("proxy", 1)) < order.index(("step_layer", 0)) < order.index(("proxy", 2))


def test_only_the_first_fetch_of_a_block_waits_for_the_last_block() -> None:
    launches, _ = run(build(SMALL, "layer-prefetch"), {0: [2, 2], 1: [2, 2]})
    appended = next(launch.id for launch in launches if launch.stage.name == "append")
    waiting = [launch for launch in launches if appended in launch.after]
    assert [(launch.stage.name, launch.layer, launch.block) for launch in waiting] == [("fetch", 0, 1)]


def main_stream(launches: list[Launch]) -> list[tuple[str, tuple[int, ...], int]]:
    """Stage, slots and block of what the main stream is given, steps of one block once."""
    order: list[tuple[str, tuple[int, ...], int]] = []
    for launch in launches:
        if launch.stage.stream == "main" and launch.block >= 0:
            slots = tuple(sorted(slot for group in launch.groups for slot in group.slots))
            what = (launch.stage.name, slots, launch.block)
            order += [what] if order[-1:] != [what] else []
    return order


def test_halves_take_turns_and_swap_only_when_their_turn_comes_again() -> None:
    """The first half has the odd row; a half's swap waits for its retrieval, so the other's steps stand before it."""
    steps = {request: [2, 2] for request in range(5)}
    launches, _ = run(build(SMALL, "herald"), steps, policy=BatchPolicy.TWO_BATCH_OVERLAP, slots=5)
    first, second = (0, 1, 2), (3, 4)
    assert main_stream(launches) == [
        ("denoise", first, 0),
        ("denoise", second, 0),
        ("swap", first, 0),
        ("denoise", first, 1),
        ("swap", second, 0),
        ("denoise", second, 1),
    ]


def test_a_step_0_beside_the_main_stream_is_issued_before_the_other_halfs_steps() -> None:
    """What stands on no stream of the steps (the last block's copy, step 0) does not wait for the half's turn."""
    steps = {request: [2, 2] for request in range(4)}
    launches, _ = run(build(SMALL, "mage-cpu"), steps, policy=BatchPolicy.TWO_BATCH_OVERLAP, slots=4)
    names = {"append": "append", "project": "step 0", "decide": "decide"}
    assert [
        (names[launch.stage.name], launch.groups[0].slots[0] // 2, launch.block)
        for launch in launches
        if launch.stage.name in names and launch.layer in (0, None)
    ] == [
        ("step 0", 0, 0),
        ("step 0", 1, 0),
        ("decide", 0, 0),
        ("append", 0, 0),
        ("step 0", 0, 1),
        ("decide", 1, 0),
        ("append", 1, 0),
        ("step 0", 1, 1),
        ("decide", 0, 1),
        ("append", 0, 1),
        ("decide", 1, 1),
        ("append", 1, 1),
    ]


def test_each_half_waits_for_its_own_slowest_row_only() -> None:
    steps = {0: [1, 1], 1: [1, 1], 2: [4, 1], 3: [1, 1]}
    launches, _ = run(build(SMALL, "dense"), steps, policy=BatchPolicy.TWO_BATCH_OVERLAP, slots=4)
    rows = [launch.shape.rows for launch in launches if launch.stage.name == "denoise" and launch.block == 0]
    assert rows == [2, 2, 2, 2, 1, 1, 1]


def test_a_single_request_has_no_other_half() -> None:
    steps = {0: [2, 3, 1]}
    alike = [run(build(SMALL, "herald"), steps, policy=policy, slots=1)[0] for policy in BatchPolicy]
    orders = [[(launch.stage.name, launch.layer, launch.after) for launch in launches] for launches in alike]
    assert orders[0] == orders[1] == orders[2]


def test_a_half_that_is_served_leaves_its_turns_to_the_other_one() -> None:
    steps = {0: [1], 1: [1], 2: [1, 1, 1], 3: [1, 1]}
    launches, program = run(build(SMALL, "herald"), steps, policy=BatchPolicy.TWO_BATCH_OVERLAP, slots=4)
    blocks = [(slots, block) for name, slots, block in main_stream(launches) if name == "denoise"]
    assert blocks == [((0, 1), 0), ((2, 3), 0), ((2, 3), 1), ((2,), 2)]
    assert sorted(program.admission.finished) == [0, 1, 2, 3]
