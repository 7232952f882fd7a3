"""Device work as the executor issues it: captured once, replayed, so that no launch of the host is in its time."""

from collections.abc import Callable, Mapping

import torch

from calibration.bench import Bench
from calibration.timing import Timing, Work


def timed(bench: Bench, cases: Mapping[str, Work]) -> dict[str, Timing]:
    """Time the cases as graphs; where there is no GPU (tests) as they are."""
    if not bench.on_cuda:
        return bench.time(cases)
    return bench.time(captured(bench, cases))


def captured(bench: Bench, cases: Mapping[str, Work]) -> dict[str, Work]:
    """A replay of each case's graph. All graphs share their memory: one runs at a time, and nobody reads what it left.

    Every case runs twice before it is captured: compiling and the workspaces of libraries belong in no graph.
    """
    from herald_exec.cuda.graphs import GraphMemory

    memory = GraphMemory()
    found: dict[str, Work] = {}
    # On the stream of the timing, and not before what other streams prepare is there: the cases' arguments (pools,
    # indices, lengths) are filled on the default stream, which this one does not wait for otherwise. A length that is
    # read too early is any number, and attention goes wherever it points.
    with torch.inference_mode(), bench.on_stream():
        for name, work in cases.items():
            work()
            work()
            graph, out = memory.capture(work)
            found[name] = _replay(graph, out, work)
    return found


def _replay(graph: object, out: object, work: Work) -> Work:
    """Holds what the graph returned and the work that it was captured from.

    Memory of the first is the graph's own only as long as somebody does; of the second it reads the arguments where
    they lay: freed, they would be whatever comes next, and lengths would send attention anywhere.
    """
    kept: tuple[Callable[[], object], object, Work] = (graph.replay, out, work)  # type: ignore[attr-defined]
    return lambda: kept[0]()
