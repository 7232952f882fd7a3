"""What fits: device and host memory of a pipeline, by one formula for both interpreters.

Device memory holds what stays (weights, pools, the active blocks' logits) within the engine's usable share, and
on top of it what comes and goes (activations of the widest forward, or one prompt's prefill) within the whole. Host
memory holds the pools that live there. Pools are sized for the last block of the run.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from herald_pipeline.errors import CapacityError, ConfigError, check_number, raise_problems
from herald_pipeline.hardware import Profile, known
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home, Pool, RequestSize
from herald_pipeline.units import GB, format_bytes
from herald_pipeline.workload import Workload

WEIGHT_BYTES = 2.0
ACTIVATION_BYTES = 2.0
_UNBOUNDED = 1 << 20
"""More requests, or blocks of one request, than any machine holds: searches end there."""


class Item(NamedTuple):
    """One line of a memory budget. ``transient``: comes and goes, on top of what stays."""

    home: Home
    name: str
    num_bytes: float
    what: str
    transient: bool = False


class Limit(NamedTuple):
    """One memory limit and what is asked of it."""

    name: str
    limit_bytes: float
    needed_bytes: float
    what: str = ""

    @property
    def free_bytes(self) -> float:
        """What is left over; negative when it does not fit."""
        return self.limit_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a machine as an engine may use it, after what the user allows.

    Attributes
    ----------
    resident_bytes
        Device memory for what stays.
    hbm_bytes, dram_bytes
        All device and host memory.
    runtime_bytes
        Device memory that the runtime takes before anything is allocated.
    logit_bytes
        Bytes per logit of the active blocks.
    """

    resident_bytes: float
    hbm_bytes: float
    dram_bytes: float
    runtime_bytes: float = 0.0
    logit_bytes: float = 4.0

    @classmethod
    def of(cls, profile: Profile, *, hbm_limit_gb: float | None = None, host_limit_gb: float | None = None) -> "Memory":
        """Memory of a profile, lowered by the limits given."""
        raise_problems(
            check_number(value, path, above=0)
            for path, value in (("hbm_limit_gb", hbm_limit_gb), ("host_limit_gb", host_limit_gb))
            if value is not None
        )
        engine, machine = profile.engine, profile.machine
        hbm = known(machine.gpu.memory_gb).peak * GB
        hbm = hbm if hbm_limit_gb is None else min(hbm, hbm_limit_gb * GB)
        dram = known(machine.dram.capacity_gb).peak * GB
        dram = dram if host_limit_gb is None else min(dram, host_limit_gb * GB)
        runtime = 0.0 if engine.runtime_gb is None else engine.runtime_gb.peak * GB
        share = known(engine.usable_memory_share).peak
        return cls(share * hbm, hbm, dram, runtime, known(engine.logit_bytes).peak)


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of ``batch`` requests: every item, the limits, and which one binds."""

    batch: int
    items: tuple[Item, ...]
    memory: Memory

    def total(self, home: Home, *, transient: bool | None = None) -> float:
        """Bytes of a home's items; ``transient`` picks those that stay or those that come and go."""
        wanted = (item for item in self.items if item.home is home and transient in (None, item.transient))
        return sum(item.num_bytes for item in wanted)

    @property
    def passing_bytes(self) -> float:
        """Device memory of what comes and goes: the widest forward or a prefill, which do not run at one moment."""
        return max((item.num_bytes for item in self.items if item.transient), default=0.0)

    def limits(self) -> tuple[Limit, ...]:
        """Each limit with what is needed of it."""
        stays, passing = self.total(Home.HBM, transient=False), self.passing_bytes
        memory = self.memory
        # Where not even the weights fit, fewer requests do not help, and the name says so.
        weights = sum(item.num_bytes for item in self.items if item.name == "weights")
        resident = "gpu weights" if weights > memory.resident_bytes else "gpu kv"
        return (
            Limit(resident, memory.resident_bytes, stays, "weights, pools and logits in the engine's share"),
            Limit("gpu peak", memory.hbm_bytes, stays + passing + memory.runtime_bytes, "and what comes and goes"),
            Limit("host memory", memory.dram_bytes, self.total(Home.DRAM), "pools in DRAM"),
        )

    @property
    def binding(self) -> Limit:
        """The limit that is shortest, or closest to being so in proportion."""
        return min(self.limits(), key=lambda limit: limit.free_bytes / limit.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether every limit holds."""
        return all(limit.free_bytes >= 0 for limit in self.limits())

    @property
    def kv_bytes_per_request(self) -> float:
        """Pool bytes of one request in both memories."""
        names = ("weights", "retrieval_weights", "logits", "activations", "prefill")
        return sum(item.num_bytes for item in self.items if item.name not in names) / self.batch

    @property
    def shortage(self) -> str:
        """The limit that binds and by how much, for marks in sweeps; empty when all fits."""
        if self.fits:
            return ""
        limit = self.binding
        return f"{limit.name}, short by {-limit.free_bytes:,.0f} bytes"

    def as_dict(self) -> dict[str, object]:
        """Items and limits as plain values."""
        return {
            "batch": self.batch,
            "fits": self.fits,
            "limit": self.binding.name,
            "items": [
                {"home": item.home.value, "name": item.name, "bytes": item.num_bytes, "transient": item.transient}
                for item in self.items
            ],
            "limits": [
                {"name": limit.name, "limit_bytes": limit.limit_bytes, "needed_bytes": limit.needed_bytes}
                for limit in self.limits()
            ],
        }

    def table(self) -> str:
        """The budget for people: items by home, then each limit with what is left of it."""
        lines = [f"memory of {self.batch} request(s), kv per request {format_bytes(self.kv_bytes_per_request)}"]
        for home in Home:
            for item in self.items:
                if item.home is home and item.num_bytes:
                    mark = "peak" if item.transient else ""
                    lines.append(
                        f"  {home.value:<5}{item.name:<14}{format_bytes(item.num_bytes):>12} {mark:<5}{item.what}"
                    )
        for limit in self.limits():
            left = "left" if limit.free_bytes >= 0 else "SHORT"
            lines.append(
                f"  {limit.name}: {format_bytes(limit.needed_bytes)} of {format_bytes(limit.limit_bytes)}, "
                f"{format_bytes(abs(limit.free_bytes))} {left} ({limit.what})"
            )
        return "\n".join(lines)


def request_size(pipeline: Pipeline, tokens: int) -> RequestSize:
    """Size of a request that ends with ``tokens`` KV entries: k is that of its last block."""
    settings = pipeline.settings
    before = max(0, tokens - settings.block_length)
    return RequestSize(tokens, settings.selected_tokens(before), settings.block_length)


def pool_bytes(pool: Pool, size: RequestSize, batch: int) -> float:
    """Bytes of a pool with all its buffers, for ``batch`` requests of this size."""
    return (1 if pool.fixed else batch) * pool.buffers * pool.bytes_per_request(size)


def budget(pipeline: Pipeline, tokens: int, batch: int, memory: Memory, *, prefill_rows: int = 1) -> Budget:
    """Memory of ``batch`` requests that end with ``tokens`` KV entries each.

    ``prefill_rows``: prompts that go through the model together; the others wait their turn.
    """
    return _budget(pipeline, request_size(pipeline, tokens), batch, memory, prefill_rows)


def _budget(pipeline: Pipeline, size: RequestSize, batch: int, memory: Memory, prefill_rows: int = 1) -> Budget:
    model, block = pipeline.model, size.block_length
    groups = 1 if pipeline.template.draft_step is None else 2
    items = [Item(Home.HBM, "weights", model.weight_bytes(WEIGHT_BYTES), f"{model.num_params:,} parameters")]
    staging = 0.0
    for pool in pipeline.pools:
        if pool.prompt_only:
            staging += pool_bytes(pool, size, prefill_rows)
        else:
            items.append(Item(pool.home, pool.name, pool_bytes(pool, size, batch), _describe(pool, size, batch)))
    logits = batch * block * model.vocab_size * memory.logit_bytes
    items.append(Item(Home.HBM, "logits", logits, f"{batch} x {block} positions x {model.vocab_size:,}"))
    wide = batch * block * groups
    items.append(Item(Home.HBM, "activations", activation_bytes(model, wide), f"a forward of {wide:,} tokens", True))
    prompt = prefill_rows * (size.tokens + block)
    peak = staging + activation_bytes(model, prompt) + _prefill_score_bytes(pipeline, size, prefill_rows)
    items.append(Item(Home.HBM, "prefill", peak, f"{prefill_rows} prompt(s) of up to {size.tokens:,} tokens", True))
    return Budget(batch, tuple(items), memory)


def _describe(pool: Pool, size: RequestSize, batch: int) -> str:
    each = format_bytes(pool.bytes_per_request(size))
    batch = 1 if pool.fixed else batch
    buffers = "" if pool.buffers == 1 else f" x {pool.buffers} buffers"
    return f"{batch} x {each}{buffers}" + (f": {pool.purpose}" if pool.purpose else "")


def activation_bytes(model: ModelShape, tokens: int) -> float:
    """Activations alive at once in a layer: residual and normed input, Q, K, V and output, the inside of the FFN."""
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    inner = 2 * model.intermediate_size if model.num_dense_layers else 0
    if model.moe is not None:
        experts = model.moe.experts_per_token + model.moe.num_shared_experts
        routed = experts * (2 * model.moe.expert_intermediate_size + model.hidden_size)
        inner = max(inner, routed)
    return tokens * ACTIVATION_BYTES * (2 * model.hidden_size + heads * model.head_dim + inner)


def _prefill_score_bytes(pipeline: Pipeline, size: RequestSize, rows: int) -> float:
    """Importance of a layer's prompt positions for selection during prefill, fp32 per KV head."""
    if not size.selected_tokens or size.selected_tokens >= size.tokens:
        return 0.0
    return rows * pipeline.model.num_kv_heads * size.tokens * 4.0


def largest_batch(pipeline: Pipeline, tokens: int, memory: Memory, *, prefill_rows: int = 1) -> int:
    """Largest batch that fits, 0 when not even one request does; all smaller ones fit as well."""
    return _largest(lambda batch: budget(pipeline, tokens, batch, memory, prefill_rows=min(prefill_rows, batch)).fits)


def largest_tokens(pipeline: Pipeline, batch: int, memory: Memory) -> int:
    """Most KV entries per request, in whole blocks, with which ``batch`` requests fit; 0 when none does."""
    block = pipeline.settings.block_length
    return block * _largest(lambda blocks: budget(pipeline, blocks * block, batch, memory).fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest number for which ``fits`` holds, if it holds for all smaller ones; 0 when not even for 1."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < _UNBOUNDED and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def kv_room_tokens(pipeline: Pipeline, batch: int, memory: Memory, longest: int) -> int:
    """KV entries of all running requests together that fit: the admission's limit for requests of unequal length.

    ``longest``: KV entries of the longest request, whose prefill decides the peak. Need is linear in a request's tokens
    but for the rounding of k, which is taken upwards; so any set of requests within the room fits.
    """
    settings = pipeline.settings
    many = _UNBOUNDED * settings.block_length
    empty = RequestSize(0, 1 if settings.budget else 0, settings.block_length)
    long = RequestSize(many, settings.selected_tokens(many) + empty.selected_tokens, settings.block_length)
    slots = _budget(pipeline, empty, batch, memory)
    short_one, long_one = (_budget(pipeline, size, 1, memory) for size in (empty, long))
    passing = budget(pipeline, longest, batch, memory).passing_bytes
    limits = (
        (Home.HBM, memory.resident_bytes),
        (Home.HBM, memory.hbm_bytes - memory.runtime_bytes - passing),
        (Home.DRAM, memory.dram_bytes),
    )
    rooms = []
    for home, limit in limits:
        growth = long_one.total(home, transient=False) - short_one.total(home, transient=False)
        if growth > 0:
            rooms.append((limit - slots.total(home, transient=False)) * many / growth)
    return max(0, math.floor(min(rooms)))


def require(
    pipeline: Pipeline,
    workload: Workload,
    memory: Memory,
    *,
    others: Mapping[str, Memory] | None = None,
) -> Budget:
    """Budget of a workload whose requests all run at once; :class:`CapacityError` with the table when it does not fit.

    ``others`` are memories of further profiles, to name those that would hold it.
    """
    if workload.block_length != pipeline.settings.block_length:
        message = (
            f"workload block length {workload.block_length} differs from the method's {pipeline.settings.block_length}"
        )
        raise ConfigError(message)
    tokens = workload.largest_request_tokens
    found = budget(pipeline, tokens, workload.batch, memory)
    if not found.fits:
        raise CapacityError(explain(pipeline, tokens, found, others))
    return found


def explain(pipeline: Pipeline, tokens: int, found: Budget, others: Mapping[str, Memory] | None = None) -> str:
    """Message for what does not fit: the limit, the table, and the nearest changes that would fit."""
    lines = [
        f"{pipeline.model.name} with {pipeline.method.name}, {found.batch} request(s) of {tokens:,} tokens, "
        f"does not fit: {found.shortage}",
        found.table(),
    ]
    remedies = list(_remedies(pipeline, tokens, found, others or {}))
    lines.append(
        "nearest that fits: " + ("; or ".join(remedies) if remedies else "none with this model on this machine")
    )
    return "\n".join(lines)


def _remedies(pipeline: Pipeline, tokens: int, found: Budget, others: Mapping[str, Memory]) -> Iterable[str]:
    batch = largest_batch(pipeline, tokens, found.memory)
    if 0 < batch < found.batch:
        yield f"batch {batch}"
    shorter = largest_tokens(pipeline, found.batch, found.memory)
    if 0 < shorter < tokens:
        yield f"{shorter:,} tokens per request (context and answer)"
    for name, memory in others.items():
        if budget(pipeline, tokens, found.batch, memory).fits:
            yield f"hardware {name}"
