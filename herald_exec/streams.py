"""Streams: in-order queues that run beside one another, and the completions that launches wait for.

:class:`Streams` is what the runner needs of them; :class:`ThreadStreams` is one thread a stream. A stream of a GPU is
the same thread with the device's stream as its current one, and a completion that holds the device's event as well.
"""

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from herald_pipeline.errors import RunError

_POLL_S = 0.2
"""How often a waiting thread looks whether the other side still lives."""


class Cancelled(Exception):  # noqa: N818 - not an error of its own: the run ends with another one
    """Work that was not done because the run has failed elsewhere."""


@dataclass(slots=True, eq=False)
class Completion:
    """The end of one piece of work; ``value`` is what it returned, the times are on the streams' clock."""

    label: str
    value: Any = None
    start_ns: int = 0
    end_ns: int = 0
    queued_ns: int = 0
    _done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def done(self) -> bool:
        """Whether the work has ended (or was given up)."""
        return self._done.is_set()

    def finish(self) -> None:
        """Release everything that waits."""
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the work ended within ``timeout_s``."""
        return self._done.wait(timeout_s)


class Streams(ABC):
    """In-order queues by name."""

    @abstractmethod
    def submit(
        self,
        stream: str,
        label: str,
        work: Callable[[Completion], Any],
        after: Sequence[Completion],
        *,
        host: bool = False,
    ) -> Completion:
        """Put ``work`` behind all earlier work of ``stream``; it also waits for ``after``.

        ``host``: the work reads or writes host memory itself, so all of that must have ended on the device as well.
        """

    @abstractmethod
    def when_ended(self, completion: Completion, then: Callable[[], None]) -> None:
        """Call ``then`` once the work has ended and its times are known; called from within the work."""

    @abstractmethod
    def wait(self, completion: Completion) -> Any:
        """Value of the work once it has ended; the run's error if it has failed meanwhile."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until all streams are empty."""

    @abstractmethod
    def close(self) -> None:
        """Drop what has not begun and end the streams; safe at any time and more than once."""

    @abstractmethod
    def now_ns(self) -> int:
        """Nanoseconds since the streams were opened."""


class ThreadStreams(Streams):
    """One thread a stream.

    Parameters
    ----------
    names
        Streams to open.
    cores
        Stream -> cores that its thread may use; streams without an entry stay where the process is.

    Notes
    -----
    The first failure ends the run: later work is dropped, waiting threads are released, and :meth:`wait` and
    :meth:`drain` raise it. A thread that died without a word is found by :meth:`wait` within a fraction of a second.
    """

    def __init__(self, names: Sequence[str], cores: Mapping[str, frozenset[int]] | None = None) -> None:
        self._start_ns = time.perf_counter_ns()
        self._queues: dict[str, queue.SimpleQueue[_Item | None]] = {name: queue.SimpleQueue() for name in names}
        self._last: dict[str, Completion] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._threads = {
            name: threading.Thread(
                target=self._work, args=(name, (cores or {}).get(name)), name=f"herald-{name}", daemon=True
            )
            for name in names
        }
        for thread in self._threads.values():
            thread.start()

    def now_ns(self) -> int:
        """Nanoseconds since the streams were opened."""
        return time.perf_counter_ns() - self._start_ns

    def submit(
        self,
        stream: str,
        label: str,
        work: Callable[[Completion], Any],
        after: Sequence[Completion],
        *,
        host: bool = False,
    ) -> Completion:
        """Put ``work`` behind all earlier work of ``stream``; it also waits for ``after``."""
        self._raise_error()
        completion = self._completion(stream, label)
        self._last[stream] = completion
        self._queues[stream].put(_Item(completion, work, tuple(after), host))
        return completion

    def _completion(self, stream: str, label: str) -> Completion:
        return Completion(label, queued_ns=self.now_ns())

    def when_ended(self, completion: Completion, then: Callable[[], None]) -> None:
        """Here the work ends with the call itself."""
        completion.end_ns = self.now_ns()
        then()

    def wait(self, completion: Completion) -> Any:
        """Value of the work once it has ended; the run's error if it has failed meanwhile."""
        while not completion.wait(_POLL_S):
            self._check_threads()
        self._raise_error()
        return completion.value

    def drain(self) -> None:
        """Wait until all streams are empty."""
        for completion in list(self._last.values()):
            self.wait(completion)

    def close(self) -> None:
        """Drop what has not begun and end the threads; what is running is waited for."""
        if self._closed:
            return
        self._closed = True
        self._fail(Cancelled("closed"))
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads.values():
            thread.join()

    # Inside the threads ----------------------------------------------------------------------------------------------

    def _work(self, name: str, cores: frozenset[int] | None) -> None:
        try:
            if cores:
                _use_cores(cores)
            with self._on_stream(name):
                while True:
                    item = self._queues[name].get()
                    if item is None:
                        return
                    self._run(item)
        except BaseException as problem:
            self._fail(problem)

    def _on_stream(self, name: str) -> AbstractContextManager[Any]:
        """What surrounds all work of a stream's thread."""
        return nullcontext()

    def _run(self, item: "_Item") -> None:
        completion = item.completion
        try:
            for earlier in item.after:
                while not earlier.wait(_POLL_S) and self._error is None:
                    pass
            if self._error is None:
                self._carry_out(item)
        except BaseException as problem:
            self._fail(problem)
        finally:
            # Also on failure: whoever waits wakes up and finds the error.
            completion.finish()

    def _carry_out(self, item: "_Item") -> None:
        item.completion.start_ns = self.now_ns()
        item.completion.value = item.work(item.completion)

    def _fail(self, problem: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = problem

    def _raise_error(self) -> None:
        if self._error is not None and not isinstance(self._error, Cancelled):
            raise self._error
        if self._error is not None:
            raise RunError("the streams have been closed; open new ones for another run")

    def _check_threads(self) -> None:
        self._raise_error()
        for name, thread in self._threads.items():
            if not thread.is_alive():
                last = self._last.get(name)
                doing = "" if last is None else f"; its last work was {last.label}"
                self._fail(RunError(f"the thread of stream {name!r} ended without a word{doing}"))
                self._raise_error()


@dataclass(frozen=True, slots=True)
class _Item:
    completion: Completion
    work: Callable[[Completion], Any]
    after: tuple[Completion, ...]
    host: bool


def _use_cores(cores: frozenset[int]) -> None:
    """Bind the calling thread, and torch's parallelism in it, to ``cores``."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def split_cores(streams: Sequence[str], threads: int | None = None) -> dict[str, frozenset[int]]:
    """Cores of each stream: one half for ``main``, the other for ``retrieval``; copies go with retrieval.

    ``threads`` limits how many cores are used. With one core, or one compute stream only, nothing is bound.
    """
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    available = available[: threads or len(available)]
    if len(available) < 2 or "retrieval" not in streams:
        return {}
    half = len(available) // 2
    main, other = frozenset(available[:half]), frozenset(available[half:])
    return {name: main if name == "main" else other for name in streams}
