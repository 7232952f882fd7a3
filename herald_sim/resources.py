"""What launches compete for: the GPU's kernel queue, and the rates of DRAM and the link.

Neither has an event per kernel or per byte: both find by arithmetic when a piece of work ends, and move that time when
something joins or leaves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from herald_sim.clock import Alarm, Clock
from herald_sim.phases import BESIDE, FIRST, Flow, Kernels, Uses


class Work:
    """What resources carry: a launch's current phase, and how far it is.

    ``remaining``: nanoseconds that it takes alone. On the GPU: ``end_ns`` when it ends as things stand, ``armed_ns``
    when a timer asks next. On a shared rate: what remains is as of ``since_ns``, and goes at ``speed`` since.
    """

    __slots__ = (
        "armed_ns",
        "end_ns",
        "ends_ns",
        "flow",
        "kernels",
        "remaining",
        "since_ns",
        "speed",
        "timer",
    )
    kernels: Kernels
    flow: Flow
    end_ns: int
    armed_ns: int | None
    remaining: float
    since_ns: int
    speed: float
    ends_ns: int
    timer: Alarm | None


Done = Callable[[Any, int], None]
"""Told the work that has ended, and the time."""
StartFlow = Callable[[Any, Flow, int], None]
"""Moves a flow's bytes for a work, from a time on."""


class Rates(Protocol):
    """What a simulation's flows share: its own :class:`SharedRates`, or its part of a host's."""

    def start(self, work: Any, flow: Flow, now: int, /) -> None:
        """Move ``flow``'s bytes for ``work``."""

    def mark(self, uses: Uses, under_way: bool, now: int, /) -> None:
        """Something with these uses is under way from now on, or no more."""


class Gpu:
    """One GPU: a **large** launch (a denoise forward) and a **small** one of a high-priority stream share it.

    Kernels are not preempted. A small launch's kernel waits for the large one's kernel that is under way
    (:attr:`~herald_sim.phases.Kernels.wait_ns`), runs, and then the next one waits. In the mean over many turns that is
    a flow: of every ``wait_ns`` + ``kernel_ns`` nanoseconds the large launch has the first part, the small one the
    other, and the GPU never rests while there is work. So queueing follows from kernel counts, and which kernel meets
    which, an accident of nanoseconds, decides nothing: more of a resource then never hurts
    (docs/more-never-hurts.md has the proof). Launches of one class run one after another.
    """

    def __init__(self, env: Clock, done: Done) -> None:
        self._at = env.at
        self._calls = (self._fire,)
        self._done = done
        self._large: Work | None = None
        self._small: Work | None = None
        self._waiting: dict[bool, deque[Work]] = {False: deque(), True: deque()}
        self._ratio = 0.0
        """Where both run: the large launch's time in every nanosecond of the small one's."""
        self._since = 0
        """What remains of both is as of this time."""

    def start(self, work: Work, kernels: Kernels, small: bool, now: int) -> None:
        """Run ``kernels`` of ``work``; ``done(work, time)`` is called when they have run."""
        work.kernels = kernels
        work.remaining = float(kernels.total_ns)
        work.armed_ns = None
        if (self._small if small else self._large) is not None:
            self._waiting[small].append(work)
            return
        self._run_until(now)
        if small:
            self._small = work
        else:
            self._large = work
        self._plan(now)

    def _run_until(self, now: int) -> None:
        """Take off what has run since the last change."""
        passed, small, large = now - self._since, self._small, self._large
        self._since = now
        if small is None:
            if large is not None:
                large.remaining -= passed
        elif large is None:
            small.remaining -= passed
        else:
            own = passed / (1.0 + self._ratio)
            small.remaining -= own
            large.remaining -= passed - own

    def _plan(self, now: int) -> None:
        """Find when each launch ends if nothing joins."""
        small, large = self._small, self._large
        if small is None:
            if large is not None:
                self._arm(large, now + large.remaining)
            return
        if large is None:
            self._arm(small, now + small.remaining)
            return
        kernel_ns = small.kernels.kernel_ns
        ratio = self._ratio = large.kernels.wait_ns / kernel_ns if kernel_ns else 0.0
        both = now + small.remaining + large.remaining
        pushed = small.remaining * ratio
        if pushed <= large.remaining:
            self._arm(small, now + small.remaining + pushed)
            self._arm(large, both)
        else:
            # What is left of the small launch runs alone, or beside what follows the large one.
            self._arm(large, now + large.remaining * (1.0 + 1.0 / ratio))
            self._arm(small, both)

    def _arm(self, work: Work, end: float) -> None:
        """Let ``work`` end at ``end``. Ends only ever move later, so an earlier timer is kept and asks again."""
        end_ns = work.end_ns = round(end)
        if work.armed_ns is None:
            work.armed_ns = end_ns if end_ns > self._since else self._since
            self._at(work.armed_ns, work, self._calls)

    def _fire(self, alarm: Alarm) -> None:
        work: Work = alarm._value
        now = work.armed_ns
        assert now is not None
        if work.end_ns > now:
            work.armed_ns = work.end_ns
            self._at(work.end_ns, work, self._calls)
            return
        work.armed_ns = None
        self._run_until(now)
        small = work is self._small
        follower = self._waiting[small].popleft() if self._waiting[small] else None
        if small:
            self._small = follower
        else:
            self._large = follower
        self._plan(now)
        self._done(work, now)


_MAX_CACHED = 512


class SharedRates:
    """DRAM, the link's directions, and their sum: rates that overlapping flows share fairly.

    Every flow's speed (1 = as if alone) rises alike until a rate is used up; flows that use it stay there, the others
    go on (max-min fairness).
    """

    def __init__(self, env: Clock, done: Done) -> None:
        self._at = env.at
        self._calls = (self._fire,)
        self._done = done
        self._active: list[Work] = []
        self._mix: list[int] = []
        """Identities of the active flows' uses: what their speeds depend on."""
        self._slowed = False
        self._marks: dict[Uses, Work] = {}
        # By mix, for identities hash faster than uses do; the uses are kept with the speeds, so that their ids stay
        # theirs. None: all at full speed.
        self._speeds: dict[tuple[int, ...], tuple[tuple[float, ...] | None, tuple[Uses, ...]]] = {}

    def start(self, work: Work, flow: Flow, now: int) -> None:
        """Move ``flow``'s bytes for ``work``; ``done(work, time)`` is called when they have arrived."""
        work.flow = flow
        work.remaining = float(flow.total_ns)
        work.speed = 0.0
        active = self._active
        active.append(work)
        self._mix.append(id(flow.uses))
        if len(active) == 1:
            self._begin(work, now)  # nothing to share: no flow alone takes more than the whole of a rate
        else:
            self._share(now)

    def _begin(self, work: Work, now: int) -> None:
        """``work``, just started, goes at full speed."""
        work.speed = 1.0
        work.since_ns = now
        ends_ns = work.ends_ns = now + work.flow.total_ns
        work.timer = self._at(ends_ns, work, self._calls)

    def mark(self, uses: Uses, under_way: bool, now: int) -> None:
        """Count something with these uses, which takes no rate, among the flows from now on, or no more.

        Flows may be slower beside it.
        """
        active = self._active
        if under_way:
            work = self._marks.get(uses)
            if work is None:
                work = self._marks[uses] = Work()
                work.flow, work.speed = Flow(0, uses), 1.0
            # In front: the last one is the flow that has just started.
            active.insert(0, work)
            self._mix.insert(0, id(work.flow.uses))
        else:
            place = active.index(self._marks[uses])
            del active[place], self._mix[place]
        if active:
            self._share(now, begins=False)

    def _share(self, now: int, begins: bool = True) -> None:
        """Give every active flow its speed, and a new end where that changed; the last one ``begins``, unless not."""
        active = self._active
        key = tuple(self._mix)
        known = self._speeds.get(key)
        if known is None:
            if len(self._speeds) >= _MAX_CACHED:
                self._speeds.clear()
            uses = tuple([work.flow.uses for work in active])
            found = fair_speeds(uses)
            known = self._speeds[key] = (None if min(found) == 1.0 else found, uses)
        speeds = known[0]
        if speeds is None:
            if not self._slowed:
                if begins:
                    self._begin(active[-1], now)
                return
            speeds = (1.0,) * len(active)
        slowed = False
        for work, speed in zip(active, speeds, strict=False):
            if speed != 1.0:
                slowed = True
            if work.speed != speed:
                self._set_speed(work, speed, now)
        self._slowed = slowed

    def _set_speed(self, work: Work, speed: float, now: int) -> None:
        """``work`` goes on at ``speed``: it ends at another time, and a timer set before is void."""
        before = work.speed
        if before:
            work.remaining -= (now - work.since_ns) * before
        work.since_ns = now
        work.speed = speed
        if not speed:
            work.timer = None  # it stands until flows that go first have ended
            return
        delay = round(work.remaining / speed)
        ends_ns = work.ends_ns = now + delay if delay > 0 else now
        work.timer = self._at(ends_ns, work, self._calls)

    def _fire(self, alarm: Alarm) -> None:
        work: Work = alarm._value
        if alarm is not work.timer:
            return  # a speed has changed since: another event ends it
        work.timer = None  # it holds the work: the two would keep each other alive
        now = work.ends_ns
        place = self._active.index(work)
        del self._active[place], self._mix[place]
        if self._slowed:
            self._share(now)
        self._done(work, now)


def fair_speeds(uses: Sequence[Uses]) -> tuple[float, ...]:
    """Speed of each flow, at most 1, from the share of each rate that it uses at speed 1.

    Flows that go :data:`~herald_sim.phases.FIRST` share among themselves; the others share what they leave. One that is
    slower :data:`~herald_sim.phases.BESIDE` another kind is so while one of that kind is under way.
    """
    speeds = [1.0] * len(uses)
    slower = [[use for use in flow if use[0].startswith(BESIDE)] for flow in uses]
    if any(slower):
        uses = [tuple(use for use in flow if not use[0].startswith(BESIDE)) for flow in uses]
    room = dict.fromkeys((name for flow in uses for name, _ in flow), 1.0)
    first = {index for index, flow in enumerate(uses) if (FIRST, 0.0) in flow}
    for rising in (first, set(range(len(uses))) - first):
        _fill(uses, rising, room, speeds)
    for index, beside in enumerate(slower):
        for name, speed in beside:
            if name.removeprefix(BESIDE) in room:
                speeds[index] = min(speeds[index], speed)
    return tuple(speeds)


def _fill(uses: Sequence[Uses], rising: set[int], room: dict[str, float], speeds: list[float]) -> None:
    """Raise the speeds of flows ``rising`` alike until the room of a rate is used up, or all are at 1."""
    while rising:
        load = dict.fromkeys(room, 0.0)
        for index in rising:
            for name, share in uses[index]:
                load[name] += share
        tightest = (
            min((room[name] / load[name], name) for name in room if load[name] > 0) if any(load.values()) else None
        )
        if tightest is None or tightest[0] >= 1.0:
            break
        level, name = tightest
        stopped = [index for index in rising if any(used == name for used, _ in uses[index])]
        for index in stopped:
            speeds[index] = level
            rising.discard(index)
            for used, share in uses[index]:
                room[used] = max(0.0, room[used] - share * level)
    for index in rising:
        for used, share in uses[index]:
            room[used] = max(0.0, room[used] - share)
