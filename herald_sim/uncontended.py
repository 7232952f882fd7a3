"""A short run without contention, for many profiles: its launches are issued once, only their times change.

A launch starts when its stream is free and what it waits for has ended, and takes the time that it takes alone: what
fast mode (:mod:`herald_sim.fast`) computes for many blocks with arrays, here for few blocks with plain numbers and
without loading any. An interval asks for it some thirty times.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

from herald_pipeline.hardware import Profile
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.result import warm_up_blocks
from herald_pipeline.scheduling.launches import Feedback, Idle, Launch
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.stages import Stage, Work
from herald_pipeline.steps import FixedSteps
from herald_pipeline.units import NS_PER_S
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel

SAMPLE_BLOCKS = 5
"""Blocks of a run whose structure shows: the first, three alike, and the last."""


def why_not(pipeline: Pipeline, workload: Workload) -> str | None:
    """Reason for which a run without contention does not cover ``workload``, or ``None``."""
    first = workload.requests[0]
    alike = all(
        (r.prompt_tokens, r.new_tokens, r.arrival_ns) == (first.prompt_tokens, first.new_tokens, 0)
        for r in workload.requests
    )
    if workload.policy is not BatchPolicy.LOCKSTEP:
        return "rows cross blocks one by one"
    if not isinstance(workload.steps, FixedSteps):
        return "blocks take different numbers of steps"
    if not alike or len(workload.requests) > workload.batch:
        return "requests differ, or do not all run from the start"
    if first.blocked(pipeline.settings.block_length).blocks < SAMPLE_BLOCKS:
        return f"fewer than {SAMPLE_BLOCKS} blocks"
    return None


class _Step(NamedTuple):
    """A launch: which of the run's works it does, and the launches that it follows."""

    work: int
    after: tuple[int, ...]


class Uncontended:
    """The launches of ``workload``, of which :func:`why_not` must have found nothing; priced on one profile a call."""

    def __init__(self, pipeline: Pipeline, workload: Workload) -> None:
        self._pipeline = pipeline
        self._works: list[tuple[Stage, Work]] = []
        self._steps: list[_Step] = []
        self._block_ends: dict[int, int] = {}
        """Block -> its last launch that decides."""
        self._read(workload)
        rows, length, first = len(workload.requests), workload.block_length, workload.requests[0]
        blocks = len(self._block_ends)
        self._first = warm_up_blocks(blocks) - 1
        used = (first.prompt_tokens + first.new_tokens) % length
        self._tokens = rows * (length * (blocks - self._first - 2) + (used or length))

    def throughput_tok_s(self, profile: Profile) -> float:
        """Tokens per second in the window of the speed figures."""
        costs = CostModel(self._pipeline, profile)
        times = [costs.work_cost(stage, work).total_ns for stage, work in self._works]
        ends: list[int] = []
        for work, after in self._steps:
            start = 0
            for earlier in after:
                end = ends[earlier]
                if end > start:
                    start = end
            ends.append(start + times[work])
        blocks = sorted(self._block_ends)
        window_ns = ends[self._block_ends[blocks[-1]]] - ends[self._block_ends[blocks[self._first]]]
        return self._tokens * NS_PER_S / window_ns

    def _read(self, workload: Workload) -> None:
        newest: dict[str, int] = {}
        known: dict[tuple[str, Work], int] = {}
        program = Program(self._pipeline, workload.blocked(), slots=workload.batch)
        for launch in issued(program, cast(FixedSteps, workload.steps).count):
            stage = launch.stage
            work = stage.work(launch.shape, launch.layer)
            number = known.setdefault((stage.name, work), len(self._works))
            if number == len(self._works):
                self._works.append((stage, work))
            before = newest.get(stage.stream)
            newest[stage.stream] = launch.id
            self._steps.append(_Step(number, launch.after if before is None else (*launch.after, before)))
            if stage.decides:
                self._block_ends[launch.block] = launch.id


def issued(program: Program, steps: int) -> Iterator[Launch]:
    """Launches of a program all of whose blocks take ``steps`` steps."""
    launches = program.launches()
    feedback: Feedback | None = None
    step = 0
    while True:
        try:
            launch = launches.send(feedback)
        except StopIteration:
            return
        feedback = None
        assert not isinstance(launch, Idle)
        yield launch
        if launch.stage.decides:
            masked = launch.shape.masked_tokens > 0
            step = step + 1 if masked else 0
            feedback = Feedback(masked and step < steps)
