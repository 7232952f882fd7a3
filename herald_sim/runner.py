"""The simulator: follows the program of launches with simpy, each launch taking the time that the profile says.

The executor's runner is its twin: the same loop over ``program.launches()``, with streams of a device where this one
has queues of simulated time.
"""

import gc
from collections.abc import Iterator, Mapping

from herald_pipeline.result import Recorder
from herald_pipeline.scheduling.program import BatchPolicy, Feedback, Idle, Launch, Program
from herald_pipeline.stages import RowGroup
from herald_pipeline.steps import FixedSteps, Steps
from herald_sim.checks import Ledger
from herald_sim.clock import Alarm, Clock
from herald_sim.cost import Cost, CostModel, Phase
from herald_sim.resources import Gpu, SharedRates, Work


class _Run(Work):
    """One launch on its way: how many launches it waits for, and the phases that have not begun."""

    __slots__ = ("awaited", "blockers", "cost", "followers", "launch", "phases", "queued_ns", "start_ns")

    def __init__(self, launch: Launch, cost: Cost, now_ns: int) -> None:
        self.launch = launch
        self.cost = cost
        self.queued_ns = self.start_ns = now_ns
        self.phases: Iterator[Phase] = iter(cost.phases)
        self.blockers = 0
        self.followers: list[_Run] = []
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
    ) -> None:
        self.env = Clock()
        self.program = program
        self.recorder = recorder
        self._costs = costs
        self._steps = steps
        self._ledger = ledger
        self._last_tokens = last_tokens or {}
        self._prompt_tails = {request: tail for request, tail in (prompt_tails or {}).items() if tail}
        self._block_length = program.pipeline.settings.block_length
        self._start_kernels = Gpu(self.env, self._next_phase).start
        self._start_flow = SharedRates(self.env, self._next_phase).start
        self._small = {stream.name: stream.high_priority for stream in program.pipeline.template.streams}
        self._host = (self._issue,)
        self._launches = program.launches()
        self._pending: dict[int, _Run] = {}
        self._newest: dict[str, _Run] = {}
        self._lockstep = program.policy is BatchPolicy.LOCKSTEP
        self._fixed = steps.count if self._lockstep and isinstance(steps, FixedSteps) else None
        self._step = 0
        self._taken: dict[int, int] = {}
        self._open_rows = 0
        self._open_tokens = 0

    def run(self) -> None:
        """Run until every request has been served."""
        self._issue_at(0)
        # Nothing in a run is cyclic: looking for cycles would only cost time.
        collecting = gc.isenabled()
        gc.disable()
        try:
            self.env.run()
        finally:
            if collecting:
                gc.enable()
        self.program_ended()

    def program_ended(self) -> None:
        """Nothing may be left: a launch that still waits is a fault of ours."""
        assert not self._pending, f"{len(self._pending)} launches never ran: {[*self._pending][:5]}"

    def _issue_at(self, at_ns: int, decided: Launch | None = None) -> None:
        """Let the host go on at ``at_ns``, with what the launch ``decided`` has found."""
        self.env.at(at_ns, decided, self._host)

    def _issue(self, alarm: Alarm) -> None:
        """The host: issues launches in order, until it must know what a forward finds or nothing is there to run.

        An event's callback and not a simpy process: a process costs a second event each time that it waits.
        """
        now = self.env.now_ns
        decided: Launch | None = alarm._value
        feedback = None if decided is None else self._feedback(decided, now)
        while True:
            try:
                launch = self._launches.send(feedback)
            except StopIteration:
                return
            feedback = None
            if isinstance(launch, Idle):
                self._issue_at(max(now, launch.until_ns))
                return
            run = self._enqueue(launch, now)
            if launch.stage.decides:
                if launch.id in self._pending:
                    run.awaited = True
                    return
                feedback = self._feedback(launch, now)

    # Launches --------------------------------------------------------------------------------------------------------

    def _enqueue(self, launch: Launch, now: int) -> _Run:
        """Behind its stream's newest launch and the launches that it waits for."""
        run = _Run(launch, self._costs.price(launch), now)
        pending, stream = self._pending, launch.stage.stream
        newest = self._newest.get(stream)
        if newest is not None:
            newest.followers.append(run)
            run.blockers = 1
        for number in launch.after:
            earlier = pending.get(number)
            if earlier is not None and earlier is not newest:
                earlier.followers.append(run)
                run.blockers += 1
        pending[launch.id] = run
        self._newest[stream] = run
        if not run.blockers:
            run.start_ns = now
            self._next_phase(run, now)
        return run

    def _next_phase(self, run: _Run, now: int) -> None:
        """Give the next phase to its resource; the last one ends the launch."""
        phase = next(run.phases, None)
        if phase is None:
            self._finish(run, now)
        elif phase.on_gpu:
            self._start_kernels(run, phase, self._small[run.launch.stage.stream], now)
        else:
            self._start_flow(run, phase, now)

    def _finish(self, run: _Run, now: int) -> None:
        """The launch has run: record it, and start what waited for it alone."""
        launch, cost = run.launch, run.cost
        stage = launch.stage
        del self._pending[launch.id]
        newest = self._newest
        if newest[stage.stream] is run:
            del newest[stage.stream]
        self.recorder.record(
            launch, run.start_ns, now, queued_ns=run.queued_ns, num_bytes=cost.num_bytes, flops=cost.flops
        )
        if self._ledger is not None:
            self._ledger.finished(launch, cost, run.start_ns, now)
        if stage.decides:
            self._decided(launch, now)
        for follower in run.followers:
            follower.blockers -= 1
            if not follower.blockers:
                follower.start_ns = now
                self._next_phase(follower, now)
        if run.awaited:
            self._issue_at(now, launch)

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
        # In lockstep the batch's block ends with its last row.
        if self._open_rows and not (still_open and self._lockstep):
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
