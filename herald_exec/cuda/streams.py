"""Streams of a GPU: a host thread a stream, the device's stream current in it, and events where work meets.

What waits for what:

    device work for device work   the device waits for an event; the host goes on
    host work for device work     the waiting thread, and nobody else, sleeps until the event
    anything for host work        the thread waits for the host's completion, as without a GPU

Times are the device's: events before and after the work, put on the streams' clock once they have passed.

No thread spins: events block, queues and completions sleep. While streams are open, Python hands its lock on after
0.2 ms and not after 5: on an H200 machine a stream's thread, which needs the lock after every call that released it,
stood up to 5 ms behind the issuing thread each time (draft_down 26-35 ms instead of about 8, gaps before a selection).
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from herald_exec.streams import Completion, ThreadStreams, _Item

_NS_PER_MS = 1e6
_SWITCH_S = 2e-4
"""Longest time for which one thread keeps Python's lock from the others."""
_NEW_ANCHOR_NS = 1_000_000_000
"""Age of the anchor between the device's clock and the host's after which a new one is taken: they drift by ppm."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A value that the host knows without the device: who waits for it does not wait for the work.

    The device then has the next launches queued while it still works on this one.
    """

    value: Any


@dataclass(slots=True, eq=False)
class DeviceCompletion(Completion):
    """A completion that has ended when the host has issued its work and the device has passed ``ended``.

    ``begun`` and ``ended`` are ``None`` for work of the host alone; ``after`` is what it waited for, ``then`` whom to
    tell once its times are known, and ``timed`` that they are.
    """

    stream: str = ""
    begun: Any = None
    ended: Any = None
    after: tuple[Completion, ...] = ()
    then: Callable[[], None] | None = None
    timed: bool = False

    @property
    def done(self) -> bool:
        """Whether the work has ended on both sides; asks the device without waiting for it."""
        return self._done.is_set() and (self.ended is None or bool(self.ended.query()))


class CudaStreams(ThreadStreams):
    """One host thread and one CUDA stream for each name.

    Parameters
    ----------
    names
        Streams to open.
    device
        The GPU.
    high_priority
        Streams whose kernels go before those of others that wait for a multiprocessor.
    on_close
        Called once the device is idle: frees what was kept for the streams.

    Notes
    -----
    A value that a deciding launch returns may be a function: it is called by :meth:`wait` once the device has passed
    the work, in the caller's thread, and reads what the work left in pinned memory. A :class:`Foreseen` value is
    returned at once.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        *,
        high_priority: Collection[str] = (),
        cores: Mapping[str, frozenset[int]] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self._device_streams = {
            name: torch.cuda.Stream(device, priority=-1 if name in high_priority else 0)  # type: ignore[no-untyped-call]
            for name in names
        }
        self._newest: dict[str, Any] = {}
        self._untimed: list[DeviceCompletion] = []
        self._ends_ns = dict.fromkeys(names, 0)
        self._on_close = on_close
        self._switch_s = sys.getswitchinterval()
        self._clock_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        _Workspaces.take()
        torch.cuda.synchronize(device)  # once, before anything runs: what was prepared on other streams is there
        super().__init__(names, cores)
        sys.setswitchinterval(_SWITCH_S)
        self._origin, self._origin_ns = self._anchor()

    def wait(self, completion: Completion) -> Any:
        """Value of the work once it has ended on the device; the run's error if it has failed meanwhile."""
        super().wait(completion)
        assert isinstance(completion, DeviceCompletion)
        if isinstance(completion.value, Foreseen):
            self._settle()
            return completion.value.value
        if completion.ended is not None:
            completion.ended.synchronize()
        self._settle()
        if callable(completion.value):
            completion.value = completion.value()
        return completion.value

    def drain(self) -> None:
        """Wait until all streams are empty, on the device too."""
        super().drain()
        for completion in self._last.values():
            assert isinstance(completion, DeviceCompletion)
            if completion.ended is not None:
                completion.ended.synchronize()
        self._settle()

    def when_ended(self, completion: Completion, then: Callable[[], None]) -> None:
        """Call ``then`` from the thread that next waits for something, once the device has passed the work."""
        assert isinstance(completion, DeviceCompletion)
        completion.then = then

    def close(self) -> None:
        """End the threads and wait for the device, so that memory may be freed."""
        if self._closed:
            return
        super().close()
        sys.setswitchinterval(self._switch_s)
        try:
            for stream in self._device_streams.values():
                stream.synchronize()
        except RuntimeError as problem:
            # A broken device says so again at every call: the run ends with its first error.
            self._fail(problem)
        self._untimed.clear()
        self._on_close()
        _Workspaces.release()

    # Inside the threads ----------------------------------------------------------------------------------------------

    def _completion(self, stream: str, label: str) -> Completion:
        completion = DeviceCompletion(label, queued_ns=self.now_ns(), stream=stream)
        self._untimed.append(completion)
        return completion

    @contextmanager
    def _on_stream(self, name: str) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._device_streams[name]), torch.inference_mode():
            yield

    def _carry_out(self, item: _Item) -> None:
        completion = item.completion
        assert isinstance(completion, DeviceCompletion)
        completion.after = item.after
        name, earlier = completion.stream, [found for found in item.after if isinstance(found, DeviceCompletion)]
        if item.host:
            # The stream's own earlier work too: its copies may still be under way.
            for event in (self._newest.get(name), *(found.ended for found in earlier)):
                if event is not None:
                    event.synchronize()
            completion.start_ns = self.now_ns()
            completion.value = item.work(completion)
            completion.end_ns = self.now_ns()
            return
        stream = self._device_streams[name]
        for found in earlier:
            if found.ended is not None and found.stream != name:
                stream.wait_event(found.ended)
        completion.begun = _event()
        completion.begun.record(stream)
        completion.value = item.work(completion)
        ended = _event()
        ended.record(stream)
        completion.end_ns = self.now_ns()
        self._newest[name] = completion.ended = ended

    # Times -----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Times of all work that has ended, in the order of issue; what has not ended is left for later.

        Called by the issuing thread alone.
        """
        if self.now_ns() - self._origin_ns > _NEW_ANCHOR_NS:
            self._origin, self._origin_ns = self._anchor()
        waiting: list[DeviceCompletion] = []
        held: set[str] = set()
        for completion in self._untimed:
            ready = completion.stream not in held and completion.done
            if ready and all(earlier.timed for earlier in completion.after if isinstance(earlier, DeviceCompletion)):
                self._time(completion)
                if completion.then is not None:
                    completion.then()
            else:
                held.add(completion.stream)
                waiting.append(completion)
        self._untimed = waiting

    def _time(self, completion: DeviceCompletion) -> None:
        """Put a completion on the common clock, not before what it waited for: clocks of two devices never agree."""
        if completion.ended is not None:
            completion.start_ns = self._on_clock(completion.begun)
            # Work with a part of the host's (a download put into pages) records its event behind that part.
            completion.end_ns = self._on_clock(completion.ended)
        not_before = max([self._ends_ns[completion.stream], *(earlier.end_ns for earlier in completion.after)])
        completion.start_ns = max(completion.start_ns, not_before)
        completion.end_ns = max(completion.end_ns, completion.start_ns)
        self._ends_ns[completion.stream] = completion.end_ns
        completion.timed, completion.after = True, ()

    def _anchor(self) -> tuple[torch.cuda.Event, int]:
        """An event and the host's time at which an idle stream passed it: where device times meet the host's."""
        event = _event()
        with torch.cuda.device(self.device):
            event.record(self._clock_stream)
        event.synchronize()
        return event, self.now_ns()

    def _on_clock(self, event: Any) -> int:
        return self._origin_ns + int(self._origin.elapsed_time(event) * _NS_PER_MS)


class _Workspaces:
    """cuBLAS keeps 32 MiB for every stream that ever multiplied: a process of many runs, each with new ones, fills up.

    Freed when no streams are open: graphs hold on to the workspaces they were captured with.
    """

    _lock, _open = threading.Lock(), 0

    @classmethod
    def take(cls) -> None:
        """Streams have been opened."""
        with cls._lock:
            cls._open += 1

    @classmethod
    def release(cls) -> None:
        """Streams, and all graphs captured on them, are gone."""
        with cls._lock:
            cls._open -= 1
            if not cls._open and torch.cuda.is_available():
                torch._C._cuda_clearCublasWorkspaces()


def _event() -> torch.cuda.Event:
    """An event with its time, for which a thread sleeps: spinning would take a core from the CPU kernels."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
