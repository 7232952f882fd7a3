"""What every part of a measurement works with: the device, its clock, the threads, the model's shape, the plan.

On a machine without a GPU, "gpu" is torch on one half of the cores (one of two), the other half belongs to the
retrieval stream, and a copy within host memory stands for the link. That is how ``herald-exec`` divides such a machine.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from calibration.timing import Clock, CudaClock, HostClock, Plan, Timing, Work, interleaved
from herald_exec.models import BlockModel, random_model
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import KVDtype, ModelShape

Row = dict[str, Any]
"""One line of a raw table."""

TORCH_DTYPES = {KVDtype.FP32: torch.float32, KVDtype.BF16: torch.bfloat16, KVDtype.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Value:
    """One quantity of the profile that a part found: a number, or ``y`` over ``x``.

    ``path`` is ``machine.<section>.<key>`` or ``engine.<key>``; ``spread`` is the largest relative standard deviation
    of what went in. ``source`` is set where the number was read from the system, not timed.
    """

    path: str
    unit: str
    y: float | tuple[float, ...]
    x: tuple[float, ...] = ()
    x_unit: str = ""
    spread: float | None = None
    note: str = ""
    datasheet: str = ""


@dataclass
class Part:
    """What one part of a measurement found: quantities, and the raw table they come from."""

    name: str
    values: list[Value] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass
class Bench:
    """The machine under measurement.

    Attributes
    ----------
    shape
        The model at whose shapes products, attention and sampling are measured.
    kv_dtype
        Format of KV in device memory; ``dram_kv_dtype`` in host memory, where selection reads it.
    main_cores, retrieval_cores
        Cores that play the GPU, and cores of the retrieval stream. Empty ``main_cores``: there is a GPU.
    quick
        Fewer points and smaller sizes: about a minute on two cores.
    found
        Raw rates of parts that ran before, by path: efficiencies are shares of them.
    base, done
        The profile file's content that is being added to, and the parts that ran before.
    square
        Rows and quantity of the square products, which two parts need and one measures.
    host_gb
        Host memory that the user states, in GB.
    fused
        Time the kernels and graphs that the executor runs on a GPU (:mod:`calibration.gpu`).
    tables
        Seconds by size that one part measured and others subtract: name -> size -> seconds.
    steps
        Steps of short runs (:class:`calibration.gpu.steps.Step`), which two parts read.
    host_pool
        On a server, the pool in which host memory is measured (:class:`calibration.host_pool.HostPool`).
    say
        Takes lines of progress.
    """

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    plan: Plan
    kv_dtype: KVDtype
    dram_kv_dtype: KVDtype
    main_cores: tuple[int, ...] = ()
    retrieval_cores: tuple[int, ...] = ()
    block_length: int = 32
    quick: bool = False
    found: dict[str, float] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    done: list[Part] = field(default_factory=list)
    square: tuple[list[Row], list[Value]] | None = None
    host_gb: float | None = None
    fused: bool = False
    tables: dict[str, dict[float, float]] = field(default_factory=dict)
    steps: list[Any] = field(default_factory=list)
    host_pool: Any = None
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _stream: Any = None
    _model: BlockModel | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU to measure."""
        return self.device.type == "cuda"

    @property
    def clock(self) -> Clock:
        """Clock of work on the device."""
        return CudaClock(torch, self.device) if self.on_cuda else HostClock()

    @property
    def stream(self) -> Any:
        """The stream of the device on which cases are timed: not the default one, which waits for all others."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    @property
    def model(self) -> BlockModel:
        """The whole model with random weights, drawn once."""
        if self._model is None:
            self._model = random_model(self.shape, device=self.device, dtype=self.dtype)
        return self._model

    def table(self, name: str, part: str) -> dict[float, float]:
        """Seconds by size that an earlier part found.

        Raises
        ------
        ConfigError
            That part was left out.
        """
        if name not in self.tables:
            raise ConfigError(f"{name!r} is a table that {part!r} measures; add --only {part}")
        return self.tables[name]

    @property
    def retrieval_threads(self) -> int:
        """Threads of selection and gather."""
        return max(1, len(self.retrieval_cores))

    def time(self, cases: Mapping[str, Work]) -> dict[str, Timing]:
        """Time device work: samples of all cases in turn, on the cores that play the GPU where there is none."""
        with pinned(self.main_cores), torch.inference_mode(), self.on_stream():
            return interleaved(cases, self.plan, self.clock)

    def on_stream(self) -> AbstractContextManager[Any]:
        """Context in which device work goes to :attr:`stream`, after all that was issued before; no GPU: nothing."""
        if not self.on_cuda:
            return nullcontext()
        torch.cuda.synchronize(self.device)
        return torch.cuda.stream(self.stream)

    def time_host(self, cases: Mapping[str, Work]) -> dict[str, Timing]:
        """Time host work on the retrieval stream's cores."""
        with pinned(self.retrieval_cores), torch.inference_mode():
            return interleaved(cases, self.plan, HostClock())

    def time_anywhere(self, cases: Mapping[str, Work]) -> dict[str, Timing]:
        """Time host work that brings its own threads, on all cores of this process."""
        with torch.inference_mode():
            return interleaved(cases, self.plan, HostClock())

    def rate(self, path: str, part: str) -> float:
        """A raw rate that an earlier part found.

        Raises
        ------
        ConfigError
            That part was left out.
        """
        if path not in self.found:
            raise ConfigError(f"{path} is a raw rate that {part!r} measures; add --only {part}")
        return self.found[path]

    def random(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(*size, device=self.device, dtype=torch.float32).to(dtype or self.dtype)


@contextmanager
def pinned(cores: Iterable[int]) -> Iterator[None]:
    """Keep this thread, and torch's parallelism, on ``cores`` meanwhile; without any, nothing changes."""
    wanted = set(cores)
    if not wanted or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, wanted)
    torch.set_num_threads(len(wanted))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def divide_cores(device: torch.device, threads: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores that play the GPU and cores of retrieval: half and half without a GPU, all for retrieval with one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = cores[: threads or len(cores)]
    if device.type == "cuda":
        return (), tuple(cores)
    if len(cores) < 2:
        return tuple(cores), tuple(cores)
    half = len(cores) // 2
    return tuple(cores[:half]), tuple(cores[half:])


def row_of(timing: Timing, **columns: Any) -> Row:
    """Line of a raw table: the case's columns, then median, spread and every sample."""
    return {
        **columns,
        "seconds": timing.seconds,
        "spread": round(timing.spread, 4),
        "samples": len(timing.samples),
        "warmup": timing.warmup,
        "disturbed": timing.disturbed,
        "all_seconds": " ".join(f"{sample:.4g}" for sample in timing.samples),
    }


def widest(timings: Iterable[Timing]) -> float:
    """Largest spread of several timings."""
    return round(max((timing.spread for timing in timings), default=0.0), 4)


class Beside:
    """Context in which ``work`` runs in a loop in another thread, on ``cores``."""

    def __init__(self, cores: tuple[int, ...], work: Work) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(cores, work), daemon=True)

    def _run(self, cores: tuple[int, ...], work: Work) -> None:
        with pinned(cores), torch.inference_mode():
            while not self._stop.is_set():
                work()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
