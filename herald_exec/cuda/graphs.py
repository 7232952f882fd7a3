"""CUDA graphs that several threads capture and replay, each on its own stream."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_CAPTURING = threading.Lock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: one that frees an old graph or event in this thread would spoil the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class GraphMemory:
    """Memory that the graphs of one stream share: they run one after another, so what one has used the next may use.

    What a captured function returns stays its own as long as the graph's owner keeps it.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], T]) -> tuple[Any, T]:
        """Graph of the launches of ``work`` on the current stream, and what ``work`` returned.

        ``work`` must have run once before: compiling and workspaces do not belong in a graph. Other threads go on
        working with the device meanwhile; only captures wait for one another.
        """
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, _no_collection():
            torch.cuda.current_stream().synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = work()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph, out
