"""Selection and gather: what the retrieval stream runs on the CPU (the HERALD paper, section IV-B4)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from herald_pipeline.errors import CapacityError, ConfigError, check_number

from . import _core, results
from .dispatch import tier_index
from .elements import DTYPES, as_storage, to_float32
from .int8_keys import Int8Keys, check_keys8
from .options import PHASES, PV, Draft, Selection, SelectOptions, Store
from .tuning import GatherTuning, default_gather_tuning, default_tuning, use_of

MAX_ROWS = 1024  # query rows of one KV head: x times the group


def _per_row(value: Any, rows: int, name: str) -> npt.NDArray[np.int64]:
    array = np.asarray(value.detach().numpy() if hasattr(value, "detach") else value)
    if array.ndim == 0 and name == "budget_tokens":
        array = np.full(rows, array)
    if array.shape != (rows,) or array.dtype.kind not in "iu":
        message = f"{name} must be {rows} integers (one per row), got {array.dtype.name} {list(array.shape)}"
        raise ConfigError(message)
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_range(values: npt.NDArray[np.int64], name: str, maximum: int | None) -> None:
    wrong = np.flatnonzero((values < 0) | (values > maximum if maximum is not None else False))
    if wrong.size:
        at = int(wrong[0])
        limit = f" and at most {maximum}" if maximum is not None else ""
        message = f"{name}[{at}] must be at least 0{limit}, got {int(values[at])}"
        raise CapacityError(message) if "length" in name and values[at] > 0 else ConfigError(message)


def _float32(value: Any, name: str) -> npt.NDArray[np.float32]:
    if hasattr(value, "detach"):
        value = value.detach()
        if value.device.type != "cpu":
            message = f"{name} is on {value.device}; the CPU kernels need host memory: pass {name}.cpu()"
            raise ConfigError(message)
        value = value.float().numpy()
    array = np.asarray(value)
    if array.dtype == np.uint16:
        return to_float32(array, "bf16")
    if array.dtype.kind != "f":
        message = f"{name} must be floating point, got {array.dtype.name}"
        raise ConfigError(message)
    return np.ascontiguousarray(array, dtype=np.float32)


def check_threads(threads: int | None) -> int:
    """Threads for the extension: 0 stands for every CPU that affinity and quota allow."""
    if threads is None:
        return 0
    problem = check_number(threads, "threads", minimum=1, maximum=4096, integer=True)
    if problem:
        raise ConfigError(problem)
    return threads


def _check_queries(queries: npt.NDArray[np.float32], store: Store) -> None:
    if queries.ndim != 4 or queries.shape[3] != store.head_dim or 0 in queries.shape[1:]:
        message = f"queries must be [rows, x, num_heads, {store.head_dim}], got {list(queries.shape)}"
        raise ConfigError(message)
    heads = queries.shape[2]
    if heads % store.num_kv_heads:
        message = (
            f"num_heads must be a multiple of num_kv_heads={store.num_kv_heads} (grouped-query attention), got {heads}"
        )
        raise ConfigError(message)
    if queries.shape[1] * (heads // store.num_kv_heads) > MAX_ROWS:
        message = f"x times the group must be at most {MAX_ROWS} query rows, got x={queries.shape[1]}, {heads} heads"
        raise ConfigError(message)


@dataclass(frozen=True)
class _DraftArrays:
    view: Any = None
    layer: int = 0
    slots: npt.NDArray[np.int64] | None = None
    lengths: npt.NDArray[np.int64] | None = None


def _draft_arrays(draft: Draft | None, store: Store, layer: int, rows: int) -> _DraftArrays:
    if draft is None:
        return _DraftArrays()
    other = draft.store
    mine = (store.num_kv_heads, store.head_dim, store.dtype)
    if (other.num_kv_heads, other.head_dim, other.dtype) != mine:
        message = (
            f"the draft must have the pool's kv_heads, head_dim and dtype {mine}, "
            f"got {(other.num_kv_heads, other.head_dim, other.dtype)}"
        )
        raise ConfigError(message)
    at = layer if draft.layer is None else draft.layer
    if not 0 <= at < other.num_layers:
        message = f"draft layer must be in 0..{other.num_layers - 1}, got {at}"
        raise ConfigError(message)
    slots = _per_row(draft.slots, rows, "draft slots")
    lengths = _per_row(draft.lengths, rows, "draft lengths")
    _check_range(slots, "draft slots", other.num_slots - 1)
    _check_range(lengths, "draft lengths", other.capacity_tokens)
    return _DraftArrays(other.view, at, slots, lengths)


def select(
    store: Store,
    layer: int,
    slots: Any,
    lengths: Any,
    queries: Any,
    budget_tokens: Any,
    *,
    draft: Draft | None = None,
    extra_kv: tuple[Any, Any] | None = None,
    keys8: Int8Keys | None = None,
    options: SelectOptions | None = None,
    threads: int | None = None,
    measure: bool = False,
    gathered: tuple[Any, Any] | None = None,
    output: npt.NDArray[np.float32] | None = None,
) -> Selection:
    """Attention, importance and exact top-k for one layer of a ragged batch.

    Importance of a position for one KV head is the sum of its normalised attention weights over the x * G query rows of
    that head. The ``min(budget, length)`` largest are returned in ascending position; equal values keep the lower
    position, NaN ranks last. Results have the same bits for any number of threads.

    Parameters
    ----------
    store, layer
        The KV, and which layer of it.
    slots, lengths, budget_tokens
        Integers per row: the request's slot, its valid tokens (0 is legal), and k per KV head.
    queries
        ``[rows, x, num_heads, head_dim]``, already rotated; ``1 / sqrt(head_dim)`` is applied inside.
    draft, extra_kv
        Rows that take part in attention only: a drafted block, and each query's own key and value
        ``[rows, x, kv_heads, head_dim]``.
    keys8
        8-bit keys of the same pool: they are scanned instead of K (:mod:`.int8_keys` says what stays exact). The
        output then comes from the selected entries, as with ``key_only``.
    threads
        At most this many; ``None`` is every CPU that affinity and the cgroup's quota allow.
    measure
        Fill ``phase_seconds``.
    gathered
        Two buffers as :func:`gather` fills them, filled here: each worker copies what it selected right behind its
        top-k, while a part of those rows may still be in a cache.
    output
        Where the attention output goes, ``[rows, x, num_heads, head_dim]`` fp32, contiguous; ``None`` makes an array.

    Raises
    ------
    ConfigError
        A shape, dtype or value that breaks a rule.
    CapacityError
        A length beyond the store, or no memory for the workspace.
    """
    options = options or SelectOptions()
    q = _float32(queries, "queries")
    _check_queries(q, store)
    rows, x, num_heads, head_dim = q.shape
    if not 0 <= layer < store.num_layers:
        message = f"layer must be in 0..{store.num_layers - 1}, got {layer}"
        raise ConfigError(message)
    slot_of = _per_row(slots, rows, "slots")
    length_of = _per_row(lengths, rows, "lengths")
    budget = _per_row(budget_tokens, rows, "budget_tokens")
    _check_range(slot_of, "slots", store.num_slots - 1)
    _check_range(length_of, "lengths", store.capacity_tokens)
    _check_range(budget, "budget_tokens", None)
    extra = _draft_arrays(draft, store, layer, rows)
    own_k = own_v = None
    if extra_kv is not None:
        own_k, own_v = _float32(extra_kv[0], "extra_kv[0]"), _float32(extra_kv[1], "extra_kv[1]")
        wanted = (rows, x, store.num_kv_heads, head_dim)
        if own_k.shape != wanted or own_v.shape != wanted:
            message = f"extra_kv must be two arrays {list(wanted)}, got {list(own_k.shape)} and {list(own_v.shape)}"
            raise ConfigError(message)
    longest = int(length_of.max(initial=0))
    max_k = int(np.minimum(budget, length_of).max(initial=0))
    output = _output(output, q.shape)
    indices = results.empty((rows, store.num_kv_heads, max_k), np.int32)  # filled by the kernels' threads, to the end
    counts = np.zeros((rows, store.num_kv_heads), np.int32)
    status = np.zeros((rows, store.num_kv_heads), np.uint8)
    importance = None
    if options.keep_importance:
        importance = np.zeros((rows, store.num_kv_heads, longest), np.float32)
    phases = np.zeros(len(PHASES))
    extra_args: tuple[Any, ...] = ()
    if gathered is not None:
        outs = _gather_buffers(store, (*indices.shape, head_dim), *gathered)
        extra_args = ((outs[0].ctypes.data, outs[1].ctypes.data, default_gather_tuning().numbers()),)
    use = use_of(x * num_heads // store.num_kv_heads, key_only=options.key_only, keys8=keys8 is not None)
    tuning = options.tuning or default_tuning(use)
    done = _core.select(
        tier_index(),
        store.view,
        extra.view,
        check_keys8(keys8, store, refused=options.paper_like or options.smoothing > 1),
        options.candidates,
        int(options.rescore_all),
        layer,
        extra.layer,
        slot_of,
        length_of,
        budget,
        extra.slots,
        extra.lengths,
        q,
        own_k,
        own_v,
        PV[options.pv],
        int(options.key_only),
        options.smoothing,
        int(options.paper_like),
        tuning.numbers(),
        check_threads(threads),
        output,
        indices,
        counts,
        status,
        importance,
        phases if measure else None,
        *extra_args,
    )
    if not done:
        message = f"no memory for the selection's workspace ({rows} rows, longest {longest} tokens, x={x})"
        raise CapacityError(message)
    return Selection(output, indices, counts, status, importance, phases)


def _output(given: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if given is None:
        return results.empty(shape, np.float32)
    array: npt.NDArray[np.float32] = np.asarray(given)
    if array.shape != shape or array.dtype != np.float32 or not array.flags.carray:
        message = (
            f"output must be contiguous, writable float32 {list(shape)}, got {array.dtype.name} {list(array.shape)}"
        )
        raise ConfigError(message)
    return array


def _gather_buffers(store: Store, shape: tuple[int, ...], out_k: Any, out_v: Any) -> list[npt.NDArray[Any]]:
    buffers = []
    for name, out in (("out_k", out_k), ("out_v", out_v)):
        array = as_storage(out, store.dtype, name)
        if array.shape != shape or not array.flags.c_contiguous or not array.flags.writeable:
            message = f"{name} must be contiguous, writable {list(shape)}, got {list(array.shape)}"
            raise ConfigError(message)
        buffers.append(array)
    return buffers


def gather(
    store: Store,
    layer: int,
    slots: Any,
    selection: Selection,
    out_k: Any,
    out_v: Any,
    *,
    threads: int | None = None,
    tuning: GatherTuning | None = None,
) -> None:
    """Copy the selected rows of K and V into contiguous buffers, ascending; rows beyond a count become zeros.

    Parameters
    ----------
    out_k, out_v
        ``[rows, kv_heads, max_k, head_dim]``, contiguous, in the store's dtype: torch (pinned or not) or numpy.
        64-byte aligned buffers are written past the cache.
    """
    rows = selection.indices.shape[0]
    slot_of = _per_row(slots, rows, "slots")
    _check_range(slot_of, "slots", store.num_slots - 1)
    if not 0 <= layer < store.num_layers:
        message = f"layer must be in 0..{store.num_layers - 1}, got {layer}"
        raise ConfigError(message)
    shape = (*selection.indices.shape, store.head_dim)
    if selection.indices.shape[1] != store.num_kv_heads:
        message = f"the selection has {selection.indices.shape[1]} KV heads, the store {store.num_kv_heads}"
        raise ConfigError(message)
    buffers = _gather_buffers(store, shape, out_k, out_v)
    highest = int(selection.indices.max(initial=-1))
    if highest >= store.capacity_tokens or int(selection.counts.max(initial=0)) > selection.indices.shape[2]:
        message = f"the selection names position {highest}; the store holds {store.capacity_tokens} tokens"
        raise ConfigError(message)
    _core.gather(
        tier_index(),
        store.view,
        layer,
        slot_of,
        np.ascontiguousarray(selection.indices),
        np.ascontiguousarray(selection.counts),
        buffers[0].ctypes.data,
        buffers[1].ctypes.data,
        (tuning or default_gather_tuning()).numbers(),
        check_threads(threads),
    )


def topk(values: Any, k: int, *, heap: bool = False) -> npt.NDArray[np.int32]:
    """Ascending positions of the k largest fp32 values by the kernels' rule (ties: lower position; NaN last).

    ``heap`` runs the paper's min-heap instead: same result, the benchmark's baseline.
    """
    array = _float32(values, "values")
    problem = check_number(k, "k", minimum=0, integer=True)
    if problem or array.ndim != 1:
        message = problem or f"values must have one dimension, got {list(array.shape)}"
        raise ConfigError(message)
    kept = min(k, array.shape[0])
    out = np.empty(kept + 16, np.int32)
    count = _core.topk(tier_index(), array, kept, int(heap), out)
    return out[:count].copy()


def kernel_kind(queries: int, group: int, dtype: str, head_dim: int, pv: str = "auto") -> str:
    """Which kernel the active tier takes for ``queries`` a token and ``group`` query heads a KV head.

    ``few``, ``many`` (query rows, their product), or ``amx``: on matrix tiles, with queries and probabilities in bf16.
    """
    return _core.kind_for(tier_index(), queries, group, DTYPES[dtype], head_dim, PV[pv])
