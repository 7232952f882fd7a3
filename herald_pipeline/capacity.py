"""What fits: device and host memory of a pipeline, by one formula for both interpreters.

Device memory holds what stays (weights, pools, the active blocks' logits) within the engine's usable share, and
on top of it what comes and goes (activations of the widest forward, or one prompt's prefill) within the whole. Host
memory holds the pools that live there. Pools are sized for the last block of the run.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.memory import Budget, Item, Limit, Memory
from herald_pipeline.model import KVDtype, ModelShape, bytes_per_element
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.pools import Home, Pool, RequestSize
from herald_pipeline.units import GB, format_bytes
from herald_pipeline.workload import Workload

__all__ = [
    "EXECUTED_FORMATS",
    "Budget",
    "Item",
    "Limit",
    "Memory",
    "RequestSize",
    "activation_bytes",
    "budget",
    "explain",
    "kv_room_tokens",
    "largest_batch",
    "largest_tokens",
    "pool_bytes",
    "request_size",
    "require",
]

WEIGHT_BYTES = 2.0
ACTIVATION_BYTES = 2.0
EXECUTED_FORMATS = (KVDtype.FP32, KVDtype.BF16, KVDtype.FP16)
"""KV formats that run; the others can only be simulated."""
_SCORES_AT_ONCE = 3
"""Matrices of a row's scores that selection on the device holds: the scores, what is subtracted, its exponential."""
_UNBOUNDED = 1 << 20
"""More requests, or blocks of one request, than any machine holds: searches end there."""


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
    actions = {stage.action for stage in pipeline.template.stages()}
    items = [Item(Home.HBM, "weights", model.weight_bytes(WEIGHT_BYTES), f"{model.num_params:,} parameters")]
    staging = 0.0
    prefill_rows = prefill_rows if memory.prefills else 0
    held_rows = batch if prefill_rows and memory.prompts_wait_in_layer else prefill_rows
    for pool in pipeline.pools:
        if pool.name == "gathered" and memory.lands_uploads:
            landing = pool_bytes(pool, size, batch) / pool.buffers
            items.append(Item(Home.HBM, "landing", landing, "a layer's upload on its way to where attention reads it"))
        if pool.name == "fetched" and memory.lands_uploads and "fetch" in actions:
            landing = pool.bytes_per_request(size)
            items.append(Item(Home.HBM, "row_landing", landing, "a row's layer on its way to where attention reads it"))
        if pool.prompt_only:
            staging += pool_bytes(pool, size, held_rows)
        else:
            items.append(Item(pool.home, pool.name, pool_bytes(pool, size, batch), _describe(pool, size, batch)))
    logits = batch * block * model.vocab_size * memory.logit_bytes
    items.append(Item(Home.HBM, "logits", logits, f"{batch} x {block} positions x {model.vocab_size:,}"))
    items.append(Item(Home.HBM, "workspaces", memory.workspace_bytes, "of libraries"))
    wide = batch * block * groups
    items.append(Item(Home.HBM, "activations", activation_bytes(model, wide), f"a forward of {wide:,} tokens", True))
    if memory.lands_uploads and "select_step" in actions:
        scores = _SCORES_AT_ONCE * 4.0 * model.num_heads * block * size.tokens
        items.append(Item(Home.HBM, "selection", scores, f"a row's weights of {block} queries, fp32", True))
    prompt = prefill_rows * (size.tokens + block)
    waiting = (held_rows - prefill_rows) * (size.tokens + block) * model.hidden_size * ACTIVATION_BYTES
    computed = activation_bytes(model, prompt) + _prefill_score_bytes(pipeline, size, prefill_rows)
    peak = staging + waiting + computed
    prompts = f"{held_rows} prompt(s) of up to {size.tokens:,} tokens" if prefill_rows else "KV is synthetic"
    items.append(Item(Home.HBM, "prefill", peak, prompts, True))
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
    formats: Sequence[KVDtype] = EXECUTED_FORMATS,
) -> Budget:
    """Budget of a workload whose requests all run at once; :class:`CapacityError` with the table when it does not fit.

    ``others`` and ``formats``: as for :func:`explain`.
    """
    if workload.block_length != pipeline.settings.block_length:
        message = (
            f"workload block length {workload.block_length} differs from the method's {pipeline.settings.block_length}"
        )
        raise ConfigError(message)
    tokens = workload.largest_request_tokens
    found = budget(pipeline, tokens, workload.batch, memory)
    if not found.fits:
        raise CapacityError(explain(pipeline, tokens, found, others=others, formats=formats))
    return found


def explain(
    pipeline: Pipeline,
    tokens: int,
    found: Budget,
    *,
    others: Mapping[str, Memory] | None = None,
    formats: Sequence[KVDtype] = EXECUTED_FORMATS,
) -> str:
    """Message for what does not fit: the limit, the table, and the nearest changes that would fit.

    ``others`` are memories of further profiles, and ``formats`` the storage formats of KV, that may be named.
    """
    remedies = _remedies(pipeline, tokens, found, others or {}, formats)
    lines = [
        f"{pipeline.model.name} with {pipeline.method.name}, {found.batch} request(s) of {tokens:,} tokens, "
        f"does not fit: {found.shortage}",
        found.table(),
        f"nearest that fits: {'; or '.join(remedies)}",
    ]
    return "\n".join(lines)


def _remedies(
    pipeline: Pipeline, tokens: int, found: Budget, others: Mapping[str, Memory], formats: Sequence[KVDtype]
) -> Iterator[str]:
    batch = largest_batch(pipeline, tokens, found.memory)
    if 0 < batch < found.batch:
        yield f"batch {batch}"
    shorter = largest_tokens(pipeline, found.batch, found.memory)
    if 0 < shorter < tokens:
        yield f"{shorter:,} tokens per request (context and answer)"
    for name in _narrower(pipeline, formats):
        if budget(_stored_as(pipeline, name), tokens, found.batch, found.memory).fits:
            yield f"KV in {name}"
            break
    machines = [name for name, memory in others.items() if budget(pipeline, tokens, found.batch, memory).fits]
    yield from (f"hardware {name}" for name in machines)
    if not machines:
        yield _machine_that_fits(found)


def _narrower(pipeline: Pipeline, formats: Sequence[KVDtype]) -> list[KVDtype]:
    """Formats that take less than the KV's own in either memory, the widest first."""
    settings, dim = pipeline.settings, pipeline.model.head_dim
    own = max(bytes_per_element(dtype, dim) for dtype in (settings.kv_dtype, settings.dram_kv_dtype))
    smaller = [dtype for dtype in formats if bytes_per_element(dtype, dim) < own]
    return sorted(smaller, key=lambda dtype: -bytes_per_element(dtype, dim))


def _stored_as(pipeline: Pipeline, dtype: KVDtype) -> Pipeline:
    """The pipeline with KV in another format in both memories."""
    settings = pipeline.settings
    same = {spec.name: getattr(settings, spec.name) for spec in fields(settings)}
    return build(pipeline.model, pipeline.method, **{**same, "kv_dtype": dtype, "dram_kv_dtype": dtype})


def _machine_that_fits(found: Budget) -> str:
    """What a machine needs of either memory, where the engine keeps the same share of it back."""
    memory, stays = found.memory, found.total(Home.HBM, transient=False)
    share = memory.resident_bytes / memory.hbm_bytes
    hbm = max(stays / share, stays + found.passing_bytes + memory.runtime_bytes, memory.hbm_bytes)
    dram = max(found.total(Home.DRAM), memory.dram_bytes)
    sizes = [
        f"{math.ceil(10 * needed / GB) / 10:,.1f} GB of {what} memory"
        for needed, has, what in ((hbm, memory.hbm_bytes, "device"), (dram, memory.dram_bytes, "host"))
        if needed > has
    ]
    return f"a machine with {' and '.join(sizes)}"
