"""Requests of unequal length in memory: the room that admission hands out, and what those that ran at once took.

Both interpreters decide by it: which requests are served, and what a result states as its bytes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from herald_pipeline import capacity
from herald_pipeline.capacity import EXECUTED_FORMATS
from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.memory import Budget, Item, Memory
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home
from herald_pipeline.workload import Workload


def admission_room(
    pipeline: Pipeline,
    workload: Workload,
    memory: Memory,
    *,
    others: Callable[[], Mapping[str, Memory]] = dict,
    formats: Sequence[KVDtype] = EXECUTED_FORMATS,
) -> int | None:
    """KV entries that admission may hand out; ``None`` where a batch of one length arrives at once, which must fit.

    Parameters
    ----------
    others, formats
        Memories of further profiles, asked for only when nothing fits, and storage formats of KV, that a refusal may
        name.

    Raises
    ------
    CapacityError
        The batch that arrives at once does not fit as a whole, or not one of the requests can ever be served.
    """
    if workload.block_length != pipeline.settings.block_length:
        message = (
            f"workload block length {workload.block_length} differs from the method's {pipeline.settings.block_length}"
        )
        raise ConfigError(message)
    sizes = {request.padded_tokens(workload.block_length) for request in workload.blocked()}
    if len(sizes) == 1 and len(workload.requests) <= workload.batch:
        found = capacity.budget(pipeline, workload.largest_request_tokens, workload.batch, memory)
        if not found.fits:
            capacity.require(pipeline, workload, memory, others=others(), formats=formats)
        return None
    # A request that fits not even alone is rejected; it does not decide what the others may have.
    alone = capacity.largest_tokens(pipeline, 1, memory)
    longest = max((size for size in sizes if size <= alone), default=max(sizes))
    room = capacity.kv_room_tokens(pipeline, workload.batch, memory, longest)
    if min(sizes) > room:
        raise CapacityError(_nothing_fits(pipeline, workload, memory, min(sizes), room, others, formats))
    return room


def _nothing_fits(
    pipeline: Pipeline,
    workload: Workload,
    memory: Memory,
    smallest: int,
    room: int,
    others: Callable[[], Mapping[str, Memory]],
    formats: Sequence[KVDtype],
) -> str:
    """Why not one request is served, and what would serve one."""
    said = (
        f"none of the {len(workload.requests)} request(s) can be served: the smallest takes {smallest:,} positions in "
        f"blocks of {workload.block_length}, and memory leaves room for {room:,} with {workload.batch} slot(s)"
    )
    one = capacity.budget(pipeline, smallest, 1, memory)
    if not one.fits:
        return f"{said}\n{capacity.explain(pipeline, smallest, one, others=others(), formats=formats)}"

    def too_many(slots: int) -> bool:
        return capacity.kv_room_tokens(pipeline, slots, memory, smallest) < smallest

    fewer = bisect_left(range(1, workload.batch), True, key=too_many)
    return f"{said}; " + (f"take fewer slots: --batch {fewer}" if fewer else "raise the memory limit")


def held(pipeline: Pipeline, sizes: Sequence[int], batch: int, memory: Memory) -> Budget:
    """Memory of requests that run at once in ``batch`` slots, each with pools for its own last block.

    Logits and what comes and goes are those of all slots and of the longest request, as in :func:`capacity.budget`.

    Parameters
    ----------
    sizes
        KV entries with which each request ends; one at least.
    """
    whole = capacity.budget(pipeline, max(sizes), batch, memory)
    alone = {size: _by_name(capacity.budget(pipeline, size, 1, memory)) for size in set(sizes)}
    counts = Counter(sizes)
    own = {pool.name for pool in pipeline.pools if not pool.fixed} | {"landing"}

    def item_of(item: Item) -> Item:
        if item.transient or item.name not in own:
            return item
        num_bytes = sum(count * alone[size][item.name] for size, count in counts.items())
        return item._replace(num_bytes=num_bytes, what=f"{len(sizes)} request(s) of their own lengths")

    return Budget(batch, tuple(item_of(item) for item in whole.items), memory)


def _by_name(found: Budget) -> dict[str, float]:
    return {item.name: item.num_bytes for item in found.items}


def pool_bytes_held(pipeline: Pipeline, sizes: Sequence[int], home: Home) -> float:
    """Bytes of the pools in ``home`` of requests that run at once, each of its own length."""
    return sum(
        capacity.pool_bytes(pool, capacity.request_size(pipeline, size), count)
        for pool in pipeline.pools
        if pool.home is home and not pool.prompt_only
        for size, count in ({max(sizes): 1} if pool.fixed else Counter(sizes)).items()
    )
