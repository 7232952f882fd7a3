"""The program: launches in the order of issue, with the launches that each must wait for.

Both interpreters follow it: they issue each launch to its stream, let it start when the stream is free and the launches
in ``after`` have ended, and answer a launch that ``decides`` with which rows still hold masked positions. All that a
batch policy means is in here, so simulated and real runs cannot differ in it.
"""

from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import starmap

from herald_pipeline.pipeline import Pipeline
from herald_pipeline.scheduling.admission import Admission, Request
from herald_pipeline.scheduling.launches import Feedback, Idle, Issue, Launch
from herald_pipeline.scheduling.rows import Cohort, Row, Taken, begin_block
from herald_pipeline.scheduling.wiring import Wiring
from herald_pipeline.stages import Edge, Rows, Section, Stage, launch_shape


class BatchPolicy(StrEnum):
    """When a row that has completed its block goes on."""

    LOCKSTEP = "lockstep"
    """The batch crosses blocks together (the paper's)."""
    FIRST_DONE_FIRST_OUT = "first-done-first-out"
    """A row begins its next block in the next forward; rows at different steps share forwards."""
    TWO_BATCH_OVERLAP = "two-batch-overlap"
    """The batch crosses blocks as two halves that take turns on the main stream, each in lockstep: what one half waits
    for (its draft, its copies, its retrieval, a step 0 on the CPU) runs beside the other half's steps, and the CPU goes
    from one half's retrieval to the other's. Beyond the paper."""

    @property
    def parts(self) -> int:
        """Parts of a batch that complete blocks one by one (first-done-first-out: no number of them)."""
        return 2 if self is BatchPolicy.TWO_BATCH_OVERLAP else 1

    def rows_together(self, slots: int) -> int:
        """Most rows of a forward, and of a retrieval pass, where ``slots`` are decoded."""
        return -(-slots // self.parts)


Issued = Generator[Issue | Idle, Feedback | None, Feedback | None]
_Half = Generator[Issue | Idle | None, Feedback | None, None]
_NO_SLOTS: frozenset[int] = frozenset()
_RUNNING = frozenset({Rows.RUNNING})


class Program:
    """Launches of ``requests`` through ``pipeline``; iterate :meth:`launches`, or :meth:`issues` section by section."""

    def __init__(
        self,
        pipeline: Pipeline,
        requests: Iterable[Request],
        *,
        slots: int,
        policy: BatchPolicy = BatchPolicy.LOCKSTEP,
        kv_tokens: int | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.policy = policy
        self._template = pipeline.template
        self._block_length = pipeline.settings.block_length
        self.admission = Admission(requests, slots=slots, block_length=self._block_length, kv_tokens=kv_tokens)
        self._wiring = Wiring(pipeline.template)
        self._steps = (*pipeline.template.step, Section((pipeline.template.denoise,)))
        """A step's sections: what goes before ``denoise``, and itself."""
        self._rows: dict[int, Row] = {}
        self._left: dict[int, Cohort] = {}
        """The last cohort of each freed slot: its copies may still be under way when another request moves in."""
        self._next_id = 0

    def launches(self) -> Generator[Launch | Idle, Feedback | None, None]:
        """Yield each launch; after one whose stage ``decides`` the sender must answer with its feedback."""
        issues = self.issues()
        answer: Feedback | None = None
        while True:
            try:
                issue = issues.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(issue, Idle):
                yield issue
                continue
            for launch in issue.launches():
                answer = yield launch

    def issues(self) -> Generator[Issue | Idle, Feedback | None, None]:
        """Yield section by section what is issued together; after one with a ``decider``, its feedback is due."""
        if self.policy is BatchPolicy.TWO_BATCH_OVERLAP:
            yield from self._in_turn()
            return
        row_by_row = self.policy is BatchPolicy.FIRST_DONE_FIRST_OUT
        cohorts: list[Cohort] = []
        starting: list[int] = []
        origins: dict[int, Cohort] = {}
        now_ns = 0
        while True:
            if row_by_row or not cohorts:
                admitted = self.admission.admit(now_ns)
                if admitted:
                    prompt = self._admit(admitted)
                    yield from self._sections(self._template.prefill, prompt, prompt.slots)
                    origins.update(dict.fromkeys(admitted, prompt))
                    starting += admitted
            if starting:
                cohort = self._begin(starting, origins)
                starting = []
                cohorts.append(cohort)
                answer = yield from self._sections(self._template.head, cohort, cohort.slots)
                if answer is not None:
                    cohort.split(answer.masked)
                    now_ns = max(now_ns, answer.now_ns)
            if not cohorts:
                later = yield from self._idle(now_ns)
                if later is None:
                    return
                now_ns = later
                continue
            feedback = yield from self._step(cohorts)
            now_ns = max(now_ns, feedback.now_ns)
            for cohort in cohorts:
                done = cohort.completing
                cohort.split(feedback.masked)
                sections = self._template.after_step.get(cohort.step)
                cohort.step += 1
                if sections:
                    yield from self._sections(sections, cohort, cohort.slots)
                if done and (row_by_row or not cohort.running):
                    ended = done if row_by_row else cohort.slots
                    yield from self._sections(self._template.tail, cohort, ended, feedback.stopped)
                    origins.update(dict.fromkeys(ended, cohort))
                    starting += self._going_on(ended, feedback.stopped, cohort)
            cohorts = [cohort for cohort in cohorts if cohort.running]

    def _idle(self, now_ns: int) -> Generator[Issue | Idle, Feedback | None, int | None]:
        """Nothing to do until the next request arrives: the time then, None when none will."""
        arrival = self.admission.next_arrival_ns
        if arrival is None:
            return None
        yield Idle(arrival)
        return max(now_ns, arrival)

    def _in_turn(self) -> Generator[Issue | Idle, Feedback | None, None]:
        """Halves of what was admitted, a block each in turn."""
        now_ns = 0
        while True:
            admitted = self.admission.admit(now_ns)
            if not admitted:
                later = yield from self._idle(now_ns)
                if later is None:
                    return
                now_ns = later
                continue
            prompt = self._admit(admitted)
            yield from self._sections(self._template.prefill, prompt, prompt.slots)
            waiting = deque(self._half(half, prompt) for half in self._halves(admitted))
            while waiting:
                half = waiting.popleft()
                goes_on, now_ns = yield from self._turn(half, now_ns)
                if goes_on:
                    waiting.append(half)

    def _turn(self, half: _Half, now_ns: int) -> Generator[Issue | Idle, Feedback | None, tuple[bool, int]]:
        """What ``half`` issues until it gives its turn away: whether it goes on then, and the time."""
        answer: Feedback | None = None
        while True:
            try:
                issue = half.send(answer)
            except StopIteration:
                return False, now_ns
            if issue is None:
                return True, now_ns
            answer = yield issue
            if answer is not None:
                now_ns = max(now_ns, answer.now_ns)

    def _half(self, slots: list[int], prompt: Cohort) -> _Half:
        """All blocks of one half; ``None`` where it gives its turn away.

        Between two blocks it issues what stands before the main stream's next stage: a step 0 on another stream, which
        then runs beside the other half's steps. From there on it goes when its turn comes again: the main stream would
        have to wait (in HERALD's tail for the half's retrieval), and until then it has the other half's block to do.
        """
        tail: tuple[Section, ...] = ()
        before, stopped, template = prompt, _NO_SLOTS, self._template
        while True:
            its_turn = False
            for section in tail:
                if not its_turn and self._holds_main(section):
                    its_turn = True
                    yield None
                yield from self._sections((section,), before, before.slots, stopped)
            if before is not prompt:
                slots = self._going_on(slots, stopped, before)
            if not slots:
                return None
            cohort = self._begin(slots, dict.fromkeys(slots, before))
            for section in template.head:
                if not its_turn and self._holds_main(section):
                    its_turn = True
                    yield None
                answer = yield from self._sections((section,), cohort, cohort.slots)
                if answer is not None:
                    cohort.split(answer.masked)
            if not its_turn:
                yield None
            feedback = yield from self._steps_of(cohort)
            before, stopped, tail = cohort, feedback.stopped, template.tail

    def _holds_main(self, section: Section) -> bool:
        """Whether a stage of ``section`` stands on the stream of the steps."""
        main = self._template.denoise.stream
        return any(stage.stream == main for stage in section.stages)

    def _steps_of(self, cohort: Cohort) -> Generator[Issue | Idle | None, Feedback | None, Feedback]:
        """A block's steps, and what follows each; returns the last one's answer."""
        feedback = Feedback()
        while cohort.running:
            feedback = yield from self._step([cohort])
            cohort.split(feedback.masked)
            sections = self._template.after_step.get(cohort.step)
            cohort.step += 1
            if sections:
                yield from self._sections(sections, cohort, cohort.slots)
        return feedback

    def _halves(self, slots: Sequence[int]) -> list[list[int]]:
        """``slots`` in two parts, the first not the smaller one; one part where there is one slot."""
        first = self.policy.rows_together(len(slots))
        return [list(part) for part in (slots[:first], slots[first:]) if part]

    def _admit(self, slots: list[int]) -> Cohort:
        alike: dict[object, Row] = {}
        halves = {slot: n for n, half in enumerate(self._halves(slots)) for slot in half}
        for slot in slots:
            request = self.admission.running[slot]
            # In lockstep, equal requests that start together stay alike to their ends, so one row stands for them.
            by_row = self.policy is BatchPolicy.FIRST_DONE_FIRST_OUT
            kind = slot if by_row else (request.context, request.blocks, request.continues, halves[slot])
            if kind not in alike:
                alike[kind] = Row.admitted(request, self.pipeline.settings)
            self._rows[slot] = alike[kind]
        left = dict.fromkeys(self._left.pop(slot) for slot in slots if slot in self._left)
        previous = tuple(cohort.issued for cohort in left)
        return Cohort(-1, tuple(slots), frozenset(slots), self._rows, self._block_length, previous)

    def _begin(self, slots: list[int], origins: dict[int, Cohort]) -> Cohort:
        template = self._template
        return begin_block(
            self._rows,
            slots,
            self.pipeline.settings,
            lookahead=template.lookahead,
            first_step=template.first_step,
            origins=tuple(dict.fromkeys([origins.pop(slot) for slot in slots])),
        )

    def _going_on(self, ended: Sequence[int], stopped: frozenset[int], cohort: Cohort) -> list[int]:
        """Slots of ``ended`` that have another block; the others are freed."""
        rows = self._rows
        if not stopped and not any(row.is_last_block for row in {rows[slot] for slot in ended}):
            return list(ended)
        going_on = []
        for slot in ended:
            if rows[slot].is_last_block or slot in stopped:
                del rows[slot]
                self.admission.finish(slot)
                self._left[slot] = cohort
            else:
                going_on.append(slot)
        return going_on

    def _step(self, cohorts: Sequence[Cohort]) -> Generator[Issue | Idle, Feedback | None, Feedback]:
        """One denoise step of all running rows."""
        draft_step, first = self._template.draft_step, cohorts[0]
        taken = first.step_groups(first.step == draft_step)
        if len(cohorts) > 1:
            groups = tuple(g for c in cohorts for g in c.step_groups(c.step == draft_step)[Rows.RUNNING][0])
            taken = {Rows.RUNNING: (groups, launch_shape(groups, self._block_length))}
        feedback = None
        for section in self._steps:
            feedback = yield from self._section(section, cohorts, taken, _RUNNING)
        assert feedback is not None, "a deciding launch needs its answer"
        return feedback

    def _sections(
        self,
        sections: Sequence[Section],
        cohort: Cohort,
        slots: tuple[int, ...],
        stopped: frozenset[int] = _NO_SLOTS,
    ) -> Issued:
        """Issue ``sections`` for the rows ``slots`` of ``cohort``; returns the answer of a deciding launch."""
        answer = None
        taken = {Rows.COHORT: cohort.section_groups(slots), Rows.RUNNING: cohort.section_groups(slots)}
        following = cohort.next_slots
        if stopped or len(following) < len(cohort.slots):
            onward = tuple(s for s in slots if s in following and s not in stopped)
        else:
            onward = slots
        if onward:
            taken[Rows.NEXT] = cohort.section_groups(onward)
        taking = frozenset(taken)
        for section in sections:
            found = yield from self._section(section, (cohort,), taken, taking)
            answer = found or answer
        return answer

    def _section(
        self, section: Section, cohorts: Sequence[Cohort], taken: Mapping[Rows, Taken], taking: frozenset[Rows]
    ) -> Issued:
        """Issue one section for the rows of each kind that ``taken`` holds; returns the answer of its decider."""
        wiring = self._wiring
        plan = wiring.plan(section, taking)
        first = self._next_id
        self._next_id = first + len(plan.launches)
        # Edges that leave the section are looked up before its own launches are noted.
        outside = {}
        for position, planned in plan.outside:
            found = self._far(planned.far, planned.stage, cohorts)
            found.update(number for number in starmap(wiring.recent, planned.ring) if number is not None)
            if found:
                outside[position] = found
        for cohort in cohorts:
            issued = cohort.issued
            for name, at in plan.last:
                issued[name] = first + at
        if plan.ring:
            wiring.remember(plan, first)
        return (yield Issue(plan, first, taken, outside, cohorts[0].block, cohorts[0].step))

    def _far(self, edges: Sequence[Edge], stage: Stage, cohorts: Sequence[Cohort]) -> set[int]:
        """Launch numbers that edges from outside the section mean."""
        found: set[int] = set()
        for cohort in cohorts:
            begun = stage.name in cohort.issued
            for edge in edges:
                if edge.first_only and begun:
                    continue
                for issued in cohort.previous if edge.block_offset else (cohort.issued,):
                    number = issued.get(edge.before)
                    if number is not None:
                        found.add(number)
        return found
