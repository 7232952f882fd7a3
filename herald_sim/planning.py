"""Planning: the largest batch that fits, the batch with the highest throughput, and what would fit instead."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from herald_pipeline import capacity, hardware_io
from herald_pipeline.capacity import Budget, Memory
from herald_pipeline.errors import CapacityError
from herald_pipeline.hardware import Profile
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import Pipeline

_CANDIDATES = 12


@dataclass(frozen=True, slots=True)
class Peak:
    """The best batch, the largest one, and every batch tried with its throughput in tokens per second."""

    batch: int
    throughput_tok_s: float
    largest_batch: int
    limit: str
    tried: tuple[tuple[int, float], ...]
    budget: Budget

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "peak_batch": self.batch,
            "peak_throughput_tok_s": self.throughput_tok_s,
            "largest_batch": self.largest_batch,
            "limit": self.limit,
            "tried": [{"batch": batch, "throughput_tok_s": value} for batch, value in self.tried],
            "memory": self.budget.as_dict(),
        }


def other_memories(profile: Profile, memory: Memory) -> dict[str, Memory]:
    """Memories of the other profiles, and of this one where the limits given lowered it to ``memory``."""
    names = [name for name in hardware_io.names() if name != profile.name and _has_memory(name)]
    others = {name: Memory.of(hardware_io.resolve(name)) for name in names}
    whole = Memory.of(profile)
    return others if whole == memory else {f"{profile.name} without the memory limits given": whole, **others}


def _has_memory(name: str) -> bool:
    return not any("memory" in part for _, part in hardware_io.resolve(name).missing(()))


def find_peak(
    pipeline: Pipeline, tokens: int, profile: Profile, memory: Memory, throughput: Callable[[int], float]
) -> Peak:
    """Batch with the highest ``throughput(batch)`` among those whose requests of ``tokens`` KV entries fit.

    Tries up to a dozen batches between 1 and the largest, then the neighbours of the best; a flat top goes to the
    smallest batch that reaches it.
    """
    largest = capacity.largest_batch(pipeline, tokens, memory)
    if largest == 0:
        others = other_memories(profile, memory)
        one = capacity.budget(pipeline, tokens, 1, memory)
        raise CapacityError(capacity.explain(pipeline, tokens, one, others=others, formats=tuple(KVDtype)))
    tried = {batch: throughput(batch) for batch in _candidates(largest)}
    best = _best(tried)
    for batch in _between(sorted(tried), best):
        tried[batch] = throughput(batch)
    best = _best(tried)
    return Peak(
        best,
        tried[best],
        largest,
        capacity.budget(pipeline, tokens, largest + 1, memory).binding.name,
        tuple(sorted(tried.items())),
        capacity.budget(pipeline, tokens, best, memory),
    )


def _best(tried: dict[int, float]) -> int:
    return max(sorted(tried), key=lambda batch: tried[batch])


def _candidates(largest: int) -> list[int]:
    """Batches from 1 to ``largest``, closer to each other towards the end."""
    shares = [(index / _CANDIDATES) for index in range(1, _CANDIDATES + 1)]
    return sorted({max(1, round(largest * share)) for share in shares} | {1, largest})


def _between(batches: list[int], best: int) -> Iterator[int]:
    """Three batches on either side of ``best``, up to its neighbours."""
    at = batches.index(best)
    for low, high in ((at - 1, at), (at, at + 1)):
        if low < 0 or high >= len(batches):
            continue
        gap = batches[high] - batches[low]
        yield from sorted({batches[low] + gap * part // 4 for part in (1, 2, 3)} - {batches[low], batches[high]})
