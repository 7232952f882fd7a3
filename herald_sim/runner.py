"""The simulator: follows the program of launches with simpy, each launch taking the time that the profile says.

The executor's runner is its twin: the same loop over ``program.launches()``, with streams of a device where this one
has queues of simulated time.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from herald_pipeline.result import Recorder
from herald_pipeline.scheduling.launches import Feedback, Idle, Issue, Launch
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.scheduling.rows import Taken
from herald_pipeline.scheduling.wiring import Plan
from herald_pipeline.stages import LaunchShape, RowGroup, Rows, Stage
from herald_pipeline.steps import FixedSteps, Steps
from herald_sim.beside_fetches import GpuBesideFetches
from herald_sim.checks import Ledger
from herald_sim.clock import Alarm, Clock
from herald_sim.cost import CostModel
from herald_sim.phases import Cost, Phase
from herald_sim.pricing import Pricer
from herald_sim.resources import Done, Gpu, Rates, SharedRates, StartFlow, Work


class _Lane(Work):
    """A stream, which has one launch under way at a time: that launch, and its phases that have not begun."""

    __slots__ = ("cost", "phases", "position", "section", "small", "start_ns")
    section: "_Section"
    position: int
    cost: Cost
    phases: Iterator[Phase]
    start_ns: int

    def __init__(self, small: bool) -> None:
        self.small = small


class _Layout(NamedTuple):
    """What a section's plan means here: of each position its lane, and which of ``pricers`` says what it costs."""

    lanes: tuple[_Lane, ...]
    pricers: tuple[tuple[Pricer, Rows], ...]
    costs_as: tuple[int, ...]


class _Section:
    """A section on its way: how many launches each of its launches still waits for, and what each costs."""

    __slots__ = ("awaited", "blockers", "costs", "issue", "layout", "queued_ns")

    def __init__(self, issue: Issue, layout: _Layout, costs: list[Cost], now_ns: int) -> None:
        self.issue = issue
        self.layout = layout
        self.costs = costs
        self.blockers = list(issue.plan.blockers)
        self.queued_ns = now_ns
        self.awaited = False


class Simulation:
    """Simulated time, in integer nanoseconds, of one program on one profile."""

    def __init__(
        self,
        program: Program,
        costs: CostModel,
        steps: Steps,
        recorder: Recorder,
        *,
        ledger: Ledger | None = None,
        last_tokens: Mapping[int, int] | None = None,
        prompt_tails: Mapping[int, int] | None = None,
        env: Clock | None = None,
        flows: Callable[[Done], Rates] | None = None,
    ) -> None:
        self.env = Clock() if env is None else env
        self.program = program
        self.recorder = recorder
        self._costs = costs
        self._steps = steps
        self._ledger = ledger
        self._in_full = ledger is not None or recorder.trace is not None
        self._last_tokens = last_tokens or {}
        self._prompt_tails = {request: tail for request, tail in (prompt_tails or {}).items() if tail}
        self._block_length = program.pipeline.settings.block_length
        gpu: Gpu = (GpuBesideFetches if costs.fetches_hold_gpu else Gpu)(self.env, self._next_phase)
        self._start_kernels = gpu.start
        self._fetching: GpuBesideFetches | None = None
        ended: Done = self._next_phase
        if isinstance(gpu, GpuBesideFetches):
            self._fetching, ended = gpu, self._flow_ended
        # Replicas on one host share its clock and its memory's rate (:mod:`herald_sim.replicas`).
        rates: Rates = SharedRates(self.env, ended) if flows is None else flows(ended)
        self._start_flow: StartFlow = rates.start if self._fetching is None else self._fetching.beside(rates)
        self._lanes = {stream.name: _Lane(stream.high_priority) for stream in program.pipeline.template.streams}
        self._host = (self._wake,)
        self._issues = program.issues()
        self._layouts: dict[int, _Layout] = {}
        self._pricers: dict[tuple[str, int], Pricer] = {}
        self._pending: set[int] = set()
        """Launches that have been issued and have not ended."""
        self._newest: dict[str, int] = {}
        """Each stream's last launch issued."""
        self._held_up: dict[int, list[tuple[_Section, int]]] = {}
        """Launches of later sections that wait for a launch."""
        self._row_by_row = program.policy is BatchPolicy.FIRST_DONE_FIRST_OUT
        lockstep = program.policy is BatchPolicy.LOCKSTEP
        self._fixed = steps.count if lockstep and isinstance(steps, FixedSteps) else None
        self._step = 0
        self._taken: dict[int, int] = {}
        self._open_rows = 0
        self._open_tokens = 0

    def run(self) -> None:
        """Run until every request has been served."""
        self.begin()
        # Nothing in a run is cyclic: looking for cycles would only cost time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.env.run()
        finally:
            if collecting:
                gc.enable()
        self.program_ended()

    def begin(self) -> None:
        """Have the first section issued when the clock starts."""
        self._issue_at(0)

    def program_ended(self) -> None:
        """Nothing may be left: a launch that still waits is a fault of ours."""
        assert not self._pending, f"{len(self._pending)} launches never ran: {sorted(self._pending)[:5]}"

    def _issue_at(self, at_ns: int) -> None:
        """Let the host begin, or go on after idling, at ``at_ns``."""
        self.env.at(at_ns, None, self._host)

    def _wake(self, _alarm: Alarm) -> None:
        self._issue(None, self.env.now_ns)

    def _issue(self, decided: Launch | None, now: int) -> None:
        """The host: issues sections in order, until it must know what a forward finds or nothing is there to run.

        It goes on within the event that ends the launch ``decided``: a simpy process would cost another event.
        """
        feedback = None if decided is None else self._feedback(decided, now)
        while True:
            try:
                issue = self._issues.send(feedback)
            except StopIteration:
                return
            feedback = None
            if isinstance(issue, Idle):
                self._issue_at(max(now, issue.until_ns))
                return
            section = self._enqueue(issue, now)
            decider = issue.plan.decider
            if decider is not None:
                if issue.first + decider in self._pending:
                    section.awaited = True
                    return
                feedback = self._feedback(issue.launch(decider), now)

    # Launches --------------------------------------------------------------------------------------------------------

    def _enqueue(self, issue: Issue, now: int) -> _Section:
        """Each launch behind its stream's newest one and the launches that it waits for."""
        plan, first, taken = issue.plan, issue.first, issue.taken
        layout = self._layouts.get(id(plan)) or self._lay_out(plan, taken)
        costs = [pricer.price(taken[rows][1]) for pricer, rows in layout.pricers]
        section = _Section(issue, layout, costs, now)
        pending, newest, blockers, outside = self._pending, self._newest, section.blockers, issue.outside
        waits = {position: {newest[stream]} for stream, position in plan.first_on if newest.get(stream) in pending}
        for position, numbers in outside.items():
            waits[position] = waits[position] | numbers if position in waits else numbers
        for position, numbers in waits.items():
            for number in numbers:
                if number in pending:
                    blockers[position] += 1
                    self._held_up.setdefault(number, []).append((section, position))
        pending.update(range(first, first + len(plan.launches)))
        for stream, position in plan.last_on:
            newest[stream] = first + position
        for position in plan.ready:
            if not blockers[position]:
                self._begin(section, position, now)
        return section

    def _lay_out(self, plan: Plan, taken: Mapping[Rows, Taken]) -> _Layout:
        """The plan's layout; worked out once, for the program issues a few plans again and again."""
        which: dict[Pricer, int] = {}
        pricers: list[tuple[Pricer, Rows]] = []
        costs_as: list[int] = []
        for stage, layer, *_ in plan.launches:
            pricer = self._pricer(stage, layer, taken[stage.rows][1])
            if pricer not in which:
                which[pricer] = len(pricers)
                pricers.append((pricer, stage.rows))
            costs_as.append(which[pricer])
        lanes = tuple(self._lanes[planned.stage.stream] for planned in plan.launches)
        layout = self._layouts[id(plan)] = _Layout(lanes, tuple(pricers), tuple(costs_as))
        return layout

    def _pricer(self, stage: Stage, layer: int | None, shape: LaunchShape) -> Pricer:
        """The prices of ``stage`` in ``layer``: one for all layers of equal work."""
        alike = (stage.name, self._costs.layer_classes(stage, shape)[layer])
        if alike not in self._pricers:
            self._pricers[alike] = Pricer(self._costs.work_cost, stage, layer)
        return self._pricers[alike]

    def _begin(self, section: _Section, position: int, now: int) -> None:
        """Nothing holds the launch up any more."""
        layout = section.layout
        lane = layout.lanes[position]
        lane.section = section
        lane.position = position
        lane.start_ns = now
        cost = lane.cost = section.costs[layout.costs_as[position]]
        lane.phases = iter(cost.phases)
        self._next_phase(lane, now)

    def _next_phase(self, lane: _Lane, now: int) -> None:
        """Give the next phase to its resource; the last one ends the launch."""
        phase = next(lane.phases, None)
        if phase is None:
            self._finish(lane, now)
        elif phase.on_gpu:
            self._start_kernels(lane, phase, lane.small, now)
        else:
            self._start_flow(lane, phase, now)

    def _flow_ended(self, lane: _Lane, now: int) -> None:
        """As :meth:`_next_phase`, where kernels are slower beside some flows."""
        if self._fetching is not None:
            self._fetching.flow_ended(lane, now)
        self._next_phase(lane, now)

    def _finish(self, lane: _Lane, now: int) -> None:
        """The launch has run: record it, and start what waited for it alone."""
        section, position, cost = lane.section, lane.position, lane.cost
        issue = section.issue
        plan, number = issue.plan, issue.first + position
        self._pending.discard(number)
        if self._in_full or issue.block < 0:
            self._record(lane, now)
        else:
            stage = plan.launches[position][0]
            self.recorder.ran(stage, issue.block, lane.start_ns, now, cost.num_bytes, cost.flops)
        decided = None
        if position == plan.decider:
            decided = issue.launch(position)
            self._decided(decided, now)
        blockers = section.blockers
        for follower in plan.followers[position]:
            blockers[follower] -= 1
            if not blockers[follower]:
                self._begin(section, follower, now)
        held_up = self._held_up.pop(number, None)
        if held_up is not None:
            for later, follower in held_up:
                later.blockers[follower] -= 1
                if not later.blockers[follower]:
                    self._begin(later, follower, now)
        if decided is not None and section.awaited:
            self._issue(decided, now)

    def _record(self, lane: _Lane, now: int) -> None:
        """Record the launch with what a trace, the invariants and the prefill's figures ask of it."""
        section, cost, start_ns = lane.section, lane.cost, lane.start_ns
        launch = section.issue.launch(lane.position)
        self.recorder.record(
            launch, start_ns, now, queued_ns=section.queued_ns, num_bytes=cost.num_bytes, flops=cost.flops
        )
        if self._ledger is not None:
            self._ledger.finished(launch, cost, start_ns, now)

    # Decoding --------------------------------------------------------------------------------------------------------

    def _feedback(self, launch: Launch, now: int) -> Feedback:
        """Which rows still hold masked positions after this forward."""
        if self._fixed is not None:
            # In lockstep with one T every row is as far as the batch.
            masked = launch.shape.masked_tokens > 0
            self._step = self._step + 1 if masked else 0
            return Feedback(masked and self._step < self._fixed, now_ns=now)
        still = set()
        running = self.program.admission.running
        for group in launch.groups:
            for slot, block in zip(group.slots, group.blocks, strict=True):
                taken = self._taken.get(slot, 0) + 1
                if group.mode.completes:
                    self._taken.pop(slot, None)
                    continue
                self._taken[slot] = taken
                if taken < self._steps.steps(running[slot].id, block):
                    still.add(slot)
        return Feedback(frozenset(still), now_ns=now)

    def _decided(self, launch: Launch, now: int) -> None:
        """Count the forward, and the blocks that it completed."""
        recorder = self.recorder
        recorder.step(launch)
        if not (launch.shape.completed_rows or self._open_rows):
            return
        still_open = False
        for group in launch.groups:
            if not group.mode.completes:
                still_open = True
                continue
            self._open_rows += len(group.slots)
            self._open_tokens += self._tokens(group)
        # In lockstep the batch's (or its half's) block ends with its last row.
        if self._open_rows and (self._row_by_row or not still_open):
            recorder.block_done(now, self._open_rows, self._open_tokens)
            self._open_rows = self._open_tokens = 0

    def _tokens(self, group: RowGroup) -> int:
        """Tokens of the group's blocks that are part of an answer: the last block's padding is not.

        Neither is a prompt's tail, which shares the first block with masks.
        """
        length = self._block_length
        if not (self._last_tokens or self._prompt_tails):
            return length * len(group.slots)
        running = self.program.admission.running
        tokens = 0
        for slot, block in zip(group.slots, group.blocks, strict=True):
            request = running[slot]
            tokens += length if block + 1 < request.blocks else self._last_tokens.get(request.id, length)
            tokens -= self._prompt_tails.get(request.id, 0) if block == 0 else 0
        return tokens
