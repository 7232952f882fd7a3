"""What launches compete for: the GPU's kernel queue, and the rates of DRAM and the link.

Neither has an event per kernel or per byte: both find by arithmetic when a piece of work ends, and move that time when
something joins or leaves.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from herald_sim.clock import Alarm, Clock
from herald_sim.cost import Flow, Kernels, Uses


class Work:
    """What resources carry: a launch's current phase, and how far it is.

    On the GPU: kernels ``left`` and ``kernel_ns`` of each; ``began`` when it was first (or last) alone, ``pushed`` by
    the other launch's kernels since; ``end_ns`` when it ends as things stand, ``armed_ns`` when a timer asks next.
    On a shared rate: ``remaining`` nanoseconds at full speed as of ``since_ns``, and its ``speed`` since.
    """

    __slots__ = (
        "alone",
        "armed_ns",
        "began",
        "end_ns",
        "ends_ns",
        "flow",
        "kernel_ns",
        "kernels",
        "left",
        "pushed",
        "remaining",
        "since_ns",
        "speed",
        "timer",
    )
    kernels: Kernels
    flow: Flow
    began: float
    pushed: float
    alone: bool
    left: int
    kernel_ns: float
    end_ns: int | None
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


class Gpu:
    """One GPU: a **large** launch (a denoise forward) and a **small** one of a high-priority stream share it.

    Kernels are not preempted. A small launch's kernel begins at the next kernel boundary of the large one, then the
    large one's next kernel runs, and so on in turn. So n small kernels wait for about n large ones, and push the large
    launch back by their own time: queueing follows from kernel counts. Launches of one class run one after another.
    """

    def __init__(self, env: Clock, done: Done) -> None:
        self._at = env.at
        self._calls = (self._fire,)
        self._done = done
        self._large: Work | None = None
        self._small: Work | None = None
        self._waiting: dict[bool, deque[Work]] = {False: deque(), True: deque()}

    def start(self, work: Work, kernels: Kernels, small: bool, now: int) -> None:
        """Run ``kernels`` of ``work``; ``done(work, time)`` is called when they have run."""
        work.kernels = kernels
        work.pushed = 0.0
        work.alone = False
        work.armed_ns = None
        if (self._small if small else self._large) is not None:
            self._waiting[small].append(work)
        elif small:
            self._begin_small(work, now)
        else:
            self._begin_large(work, now)

    def _begin_small(self, work: Work, now: int) -> None:
        self._small = work
        work.left = work.kernels.count
        work.kernel_ns = work.kernels.kernel_ns
        self._plan_small(work, now)

    def _plan_small(self, work: Work, at: float) -> None:
        """Find where the small launch's remaining kernels end, first waiting at ``at``."""
        large, left = self._large, work.left
        if large is None:
            work.began = at
            work.alone = True
            self._arm(work, at + left * work.kernel_ns)
            return
        work.alone = False
        position = at - large.began - large.pushed
        inside, reached = _boundaries(large.kernels, position, left)
        pushed = inside * work.kernel_ns
        large.pushed += pushed
        self._arm(large, large.began + large.kernels.total_ns + large.pushed)
        if inside == left:
            self._arm(work, at + max(0.0, reached - position) + pushed)
        else:
            # The rest waits for what follows the large launch; its end is planned then.
            work.left = left - inside
            work.end_ns = None

    def _begin_large(self, work: Work, now: int) -> None:
        small = self._small
        self._large = work
        if small is None or not small.alone:
            work.began = float(now)
            self._arm(work, now + work.kernels.total_ns)
            return
        # The small launch runs alone: the kernel that it is in ends first.
        elapsed = now - small.began
        started = min(small.left, int(elapsed / small.kernel_ns) + 1)
        work.began = max(float(now), small.began + started * small.kernel_ns)
        small.left -= started
        self._arm(work, work.began + work.kernels.total_ns)
        if small.left:
            self._plan_small(small, work.began)
        else:
            # It is in its last kernel: the end that was planned stands.
            small.alone = False

    def _arm(self, work: Work, end: float) -> None:
        """Let ``work`` end at ``end``. Ends only ever move later, so an earlier timer is kept and asks again."""
        end_ns = work.end_ns = round(end)
        if work.armed_ns is None:
            work.armed_ns = end_ns
            self._at(end_ns, work, self._calls)

    def _fire(self, alarm: Alarm) -> None:
        work: Work = alarm._value
        now, end = work.armed_ns, work.end_ns
        if end is None or now is None:
            work.armed_ns = None
            return
        if end > now:
            work.armed_ns = end
            self._at(end, work, self._calls)
            return
        work.armed_ns = None
        if work is self._large:
            self._large = None
            small = self._small
            if small is not None and small.end_ns is None:
                self._plan_small(small, now)
            if self._waiting[False]:
                self._begin_large(self._waiting[False].popleft(), now)
        else:
            self._small = None
            if self._waiting[True]:
                self._begin_small(self._waiting[True].popleft(), now)
        self._done(work, now)


def _boundaries(kernels: Kernels, position: float, wanted: int) -> tuple[int, float]:
    """Up to ``wanted`` kernel boundaries from ``position`` on, the launch's end left out; and where the last lies."""
    # Boundary i is the end of kernel i, counted from 1; base and number are those of the segment's start.
    first, last = 0, -1
    base, number = 0.0, 0
    for time, count in kernels.segments:
        length = time * count
        if not first and position < base + length:
            # The tolerance is for sums of kernel times: a boundary just reached is reached.
            first = max(1, number + ceil((position - base) / time - 1e-6))
            last = min(kernels.count - 1, first + wanted - 1)
        if first and last <= number + count:
            return (last - first + 1, base + (last - number) * time) if last >= first else (0, position)
        base += length
        number += count
    return 0, position


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

    def _share(self, now: int) -> None:
        """Give every active flow its speed, and a new end where that changed."""
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
    """Speed of each flow, at most 1, from the share of each rate that it uses at speed 1."""
    speeds = [1.0] * len(uses)
    rising = set(range(len(uses)))
    room = dict.fromkeys((name for flow in uses for name, _ in flow), 1.0)
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
    return tuple(speeds)
