"""The executor: follows the program of launches, each launch carried out on its stream.

The simulator's runner is its twin: the same loop over ``program.launches()``, with queues of simulated time where this
one has streams of a device.
"""

import threading
import time
from collections.abc import Callable, Mapping

from herald_exec.denoising import Outcome
from herald_exec.requests import DecodeRequest, Row, launch_rows
from herald_exec.session import Action, Session, Task, bind
from herald_exec.streams import Completion, Streams
from herald_pipeline.errors import HeraldError, RunError
from herald_pipeline.result import Recorder
from herald_pipeline.scheduling.launches import Feedback, Idle, Launch
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.stages import RowGroup
from herald_pipeline.units import NS_PER_S

BeforeStage = Callable[[Launch], None]
"""Called in the stream's thread before a launch is carried out: delays and failures of tests."""


class Execution:
    """Real time, on real streams, of one program."""

    def __init__(
        self,
        program: Program,
        session: Session,
        requests: dict[int, DecodeRequest],
        streams: Streams,
        recorder: Recorder,
        *,
        before_stage: BeforeStage | None = None,
        actions: Mapping[str, Action] | None = None,
    ) -> None:
        self.program = program
        self.session = session
        self.recorder = recorder
        self._requests = requests
        self._streams = streams
        self._before_stage = before_stage
        self._actions = bind(program.pipeline, actions)
        self._pending: dict[int, Completion] = {}
        self._turns: dict[str, int] = {}
        self._rows: list[tuple[tuple[RowGroup, ...], tuple[Row, ...]]] = []
        self._lock = threading.Lock()
        self._row_by_row = program.policy is BatchPolicy.FIRST_DONE_FIRST_OUT
        self._open_rows = 0
        self._open_tokens = 0

    def run(self) -> None:
        """Run until every request has been served."""
        self._issue()
        self._streams.drain()

    def _issue(self) -> None:
        """The host: issues launches in order, and waits where it must know what a forward found."""
        launches = self.program.launches()
        feedback: Feedback | None = None
        while True:
            try:
                launch = launches.send(feedback)
            except StopIteration:
                return
            feedback = None
            if isinstance(launch, Idle):
                time.sleep(max(0, launch.until_ns - self._streams.now_ns()) / NS_PER_S)
                continue
            completion = self._enqueue(launch)
            if launch.stage.decides:
                outcome = self._streams.wait(completion)
                feedback = self._feedback(outcome)
                self._decided(launch, completion, outcome)

    # Launches --------------------------------------------------------------------------------------------------------

    def _enqueue(self, launch: Launch) -> Completion:
        """Behind its stream's newest launch and the launches that it waits for."""
        pending = self._pending
        if len(pending) > 256:
            self._pending = pending = {number: known for number, known in pending.items() if not known.done}
        # A launch that has ended is not waited for, so it may be gone from the table.
        after = [pending[number] for number in launch.after if number in pending]
        task = self._task(launch)
        completion = self._streams.submit(
            launch.stage.stream,
            task.where,
            lambda done: self._carry_out(task, done),
            after,
            host=launch.stage.resource == "cpu",
        )
        pending[launch.id] = completion
        return completion

    def _task(self, launch: Launch) -> Task:
        rows = self._launch_rows(launch)
        name = launch.stage.name
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        return Task(launch, rows, turn)

    def _launch_rows(self, launch: Launch) -> tuple[Row, ...]:
        """Rows of a launch; all launches of a section share their groups, so a pass of 100 launches makes them once."""
        for groups, rows in self._rows:
            if groups is launch.groups:
                return rows
        running = {slot: self._requests[request.id] for slot, request in self.program.admission.running.items()}
        made: tuple[Row, ...] = launch_rows(self.program.pipeline, launch, running)
        self._rows = [(launch.groups, made), *self._rows[:2]]
        return made

    def _carry_out(self, task: Task, completion: Completion) -> object:
        """In the stream's thread: the action of the stage, and its span."""
        launch = task.launch
        try:
            if self._before_stage is not None:
                self._before_stage(launch)
            value = self._actions[launch.stage.name](self.session, task)
        except HeraldError as problem:
            if task.where in str(problem):
                raise
            raise RunError(f"{task.where}: {problem}") from problem
        except Exception as problem:
            raise RunError(f"{task.where}: {type(problem).__name__}: {problem}") from problem
        self._streams.when_ended(completion, lambda: self._record(task, completion))
        return value

    def _record(self, task: Task, completion: Completion) -> None:
        start_ns, end_ns, queued_ns = completion.start_ns, completion.end_ns, completion.queued_ns
        with self._lock:
            self.recorder.record(task.launch, start_ns, end_ns, queued_ns=queued_ns, num_bytes=task.num_bytes)

    # Decoding --------------------------------------------------------------------------------------------------------

    def _feedback(self, outcome: Outcome) -> Feedback:
        """Which rows still hold masked positions after this forward."""
        return Feedback(outcome.masked, outcome.stopped, self._streams.now_ns())

    def _decided(self, launch: Launch, completion: Completion, outcome: Outcome) -> None:
        """Count the forward, and the blocks that it completed."""
        still_open = any(not group.mode.completes for group in launch.groups)
        self._open_rows += sum(len(group.slots) for group in launch.groups if group.mode.completes)
        self._open_tokens += outcome.delivered
        with self._lock:
            self.recorder.step(launch)
            # In lockstep the batch's (or its half's) block ends with its last row.
            if self._open_rows and (self._row_by_row or not still_open):
                self.recorder.block_done(completion.end_ns, self._open_rows, self._open_tokens)
                self._open_rows = self._open_tokens = 0
