"""The host's pool as a run has it: layers over most of host memory, written before anything is timed.

Host memory of a virtual machine is not one thing. Of a run's 107 GB the layers were scanned at 82 to 127 GB/s by their
place, the first ones fastest; on another machine the first gigabytes that a process was given read at 116 GB/s, and
others at 165 to 198 later. So on a server the parts that read host memory share one pool, which takes :data:`SHARE` of
what the host has, and go round places at even distances in it. Its first layer is drawn, the others are copies of it:
memory is there only once it has been written, and drawing all of it would take ten times as long.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from calibration.bench import Bench, Row, pinned
from calibration.parts.memory import free_bytes
from herald_exec import kernels
from herald_exec.kernels import _core
from herald_exec.kernels.dispatch import tier_index
from herald_exec.kernels.elements import DTYPES
from herald_pipeline.errors import CapacityError
from herald_pipeline.units import GB

SHARE = 0.75
"""Of host memory; a run's pool of 80 requests of 32K takes 0.79 of what the smallest host that holds it has."""
BY_PLACE = "by place"
"""Rows of raw tables that are of one place of host memory."""
LEAST_LAYERS = 3
"""Layers of a host that is small, and where few points are asked for (``--quick``)."""
PARTS = frozenset({"dram", "selection", "gather"})
"""Parts that read it."""
_BESIDE_LAYERS, _BESIDE_BYTES = 2.5, 4 * GB
"""What these parts hold beside it: 8-bit keys of three layers, a layer that the device reads, page-locked buffers."""
_PROGRESS_S = 5.0
_PLACES_SPREAD = 1.0
"""Spread of samples that is accepted at least where each is of another place: how far these differ is the question."""


@dataclass
class HostPool:
    """A pool of layers of the largest selection, all of them written.

    Attributes
    ----------
    written_s
        Seconds of the first write of each layer; the first one's contain drawing it.
    """

    kv: kernels.PagedKV
    written_s: list[float] = field(default_factory=list)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer, which follow one another."""
        return self.kv.nbytes // self.kv.num_layers

    def place_gb(self, layer: int) -> float:
        """Where a layer begins, in GB from the pool's begin."""
        return layer * self.layer_bytes / GB

    def spread(self, count: int) -> tuple[int, ...]:
        """Layers at even distances, up to ``count`` of them: first and last included."""
        most = self.kv.num_layers
        count = min(count, most)
        return tuple(round(i * (most - 1) / max(1, count - 1)) for i in range(count))

    def read_seconds(self, layer: int, threads: int, num_bytes: int | None = None) -> float:
        """Seconds of one plain read of a layer, or of its first ``num_bytes``."""
        start = self.kv.address + layer * self.layer_bytes
        return _core.read_seconds(tier_index(), start, num_bytes or self.layer_bytes, threads)

    def written_rows(self) -> list[Row]:
        """Raw rows of the first write, by place."""
        return [
            {"case": "first write", **self._place(layer), "bytes": self.layer_bytes, "seconds": seconds}
            | {"gb_s": round(self.layer_bytes / seconds / GB, 3)}
            for layer, seconds in enumerate(self.written_s)
        ]

    def _place(self, layer: int) -> Row:
        return {"layer": layer, "place_gb": round(self.place_gb(layer), 2)}


def grid(bench: Bench) -> list[tuple[int, int]]:
    """(requests, context) of selections and gathers."""
    if bench.on_cuda:
        # Batches and contexts of a server; the largest is the paper's.
        return [(1, 1024), (4, 4096), (16, 16384), (16, 32768), (40, 32768), (80, 16384), (80, 32768)]
    few = [(1, 256), (1, 1024), (4, 1024), (1, 4096), (4, 4096)]
    return few if bench.quick else [*few, (1, 16384), (8, 16384), (32, 16384)]


def extents(bench: Bench) -> tuple[int, int]:
    """Slots of a pool that holds every point of :func:`grid`, and tokens of each."""
    return max(rows for rows, _ in grid(bench)), max(context for _, context in grid(bench))


def host_pool(bench: Bench) -> HostPool:
    """The pool, made where it is first asked for; :func:`close` ends it.

    Raises
    ------
    CapacityError
        The host has no room for it now.
    """
    if bench.host_pool is None:
        bench.host_pool = _made(bench)
    pool: HostPool = bench.host_pool
    return pool


def close(bench: Bench) -> None:
    """Give the pool's memory back; nothing where there is none."""
    if bench.host_pool is not None:
        bench.host_pool.kv.close()
        bench.host_pool = None


def over_places(bench: Bench) -> Bench:
    """The bench for cases whose samples are each of another place."""
    return replace(bench, plan=replace(bench.plan, max_spread=max(_PLACES_SPREAD, bench.plan.max_spread)))


def num_layers(layer_bytes: float, host_bytes: float, most: int, *, quick: bool = False) -> int:
    """Layers that :data:`SHARE` of the host holds, up to the model's ``most``; :data:`LEAST_LAYERS` at least."""
    return LEAST_LAYERS if quick else max(LEAST_LAYERS, min(most, int(SHARE * host_bytes / layer_bytes)))


def check_room(layers: int, layer_bytes: float, host_bytes: float, free: float) -> None:
    """Refuse a pool beside which the host would not hold what is measured: the system would end this process.

    Raises
    ------
    CapacityError
        With what is needed, what is free, and what to do.
    """
    needed = layers * layer_bytes + _beside_bytes(layer_bytes)
    if needed > free:
        raise CapacityError(
            f"host memory is measured over {layers} layers of {layer_bytes / GB:.1f} GB ({SHARE:.0%} of the host's "
            f"{host_bytes / GB:.1f} GB, {LEAST_LAYERS} layers at least); with what lies beside them that is "
            f"{needed / GB:.1f} GB, and {max(0.0, free) / GB:.1f} GB are free: {_WHAT_TO_DO}"
        )


_WHAT_TO_DO = "end what else holds memory, or state with --host-gb how much of it this measurement may count on"


def _beside_bytes(layer_bytes: float) -> float:
    return _BESIDE_LAYERS * layer_bytes + _BESIDE_BYTES


def _made(bench: Bench) -> HostPool:
    shape = bench.shape
    slots, tokens = extents(bench)
    layer_bytes = float(slots * tokens * shape.kv_bytes_per_token_layer(bench.dram_kv_dtype))
    host_bytes = bench.rate("machine.dram.capacity_gb", "memory") * GB
    layers = num_layers(layer_bytes, host_bytes, shape.num_layers, quick=bench.quick)
    check_room(layers, layer_bytes, host_bytes, free_bytes(bench.host_gb))
    kv = kernels.PagedKV(layers, slots, shape.num_kv_heads, tokens, shape.head_dim, str(bench.dram_kv_dtype))
    found = HostPool(kv)
    try:
        with pinned(bench.retrieval_cores):
            _write(found, bench.retrieval_threads, bench.host_gb, bench.say)
    except BaseException:
        kv.close()
        raise
    return found


def _write(pool: HostPool, threads: int, host_gb: float | None, say: Callable[[str], None]) -> None:
    """Write every layer once; memory that turns out not to be there is told before the system ends this process."""
    kv, size = pool.kv, pool.layer_bytes
    begun = told = time.perf_counter()
    for layer in range(kv.num_layers):
        start, to = time.perf_counter(), kv.address + layer * size
        if free_bytes(host_gb) < size + _beside_bytes(size):
            raise CapacityError(
                f"host memory ended at {layer * size / GB:.0f} of {kv.nbytes / GB:.0f} GB that were to be written: "
                f"{_WHAT_TO_DO}"
            )
        if layer:
            _core.copy_seconds(to, kv.address, size, threads, tier_index())
        else:
            _core.fill_normal(to, kv.pages[0].size, DTYPES[kv.dtype], 0, threads)
        now = time.perf_counter()
        pool.written_s.append(now - start)
        if now - told > _PROGRESS_S:
            told = now
            say(f"  host memory: {(layer + 1) * size / GB:.0f} of {kv.nbytes / GB:.0f} GB written")
    seconds = time.perf_counter() - begun
    say(f"  host memory: a pool of {kv.nbytes / GB:.1f} GB in {kv.num_layers} places, written in {seconds:.1f} s")
