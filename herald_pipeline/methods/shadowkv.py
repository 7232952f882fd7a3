"""ShadowKV, adapted to blocks: low-rank keys on the GPU, values in host memory, chunks picked by landmarks in step 0.

At prefill the keys before RoPE, all KV heads joined, are projected on their leading right singular vectors: what stays
on the device is ``RANK`` coefficients a position, a landmark (mean key) a chunk, and in full the keys of outlier chunks
and of the newest chunks. In step 0 of a block each layer scores landmarks, rebuilds the picked keys and fetches their
values; the rebuilding hides the fetch. The other steps reuse both, as the HERALD paper adapts InfiniGen.
"""

from collections.abc import Callable
from dataclasses import replace

from herald_pipeline.errors import ConfigError
from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.layer_prefetch import offload_edges
from herald_pipeline.parts import DOWNLOAD, GATHER, MAIN, UPLOAD, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool, Region, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.stages import (
    Edge,
    LaunchShape,
    LayerLink,
    Op,
    OpKind,
    Repeat,
    Section,
    Stage,
    Template,
    Work,
    once,
)
from herald_pipeline.work import LOGIT_BYTES

CHUNK = 8
"""Positions of a chunk."""
RANK = 160
"""Coefficients kept of a position's joined keys."""
LOCAL_CHUNKS = 4
"""Newest complete chunks that are always attended to, with the positions behind them that fill no chunk yet."""
OUTLIERS_PER_1024 = 24
"""Outlier chunks of a KV head for 1,024 entries of budget."""

SHADOW_PREFIX, SHADOW_BLOCK = Access("shadow", Region.PREFIX), Access("shadow", Region.BLOCK)
VALUE_PREFIX, VALUE_BLOCK = Access("values", Region.PREFIX), Access("values", Region.BLOCK)
PICKED_KEYS, PICKED_VALUES = Access("sparse", Region.SELECTED), Access("sparse", Region.VALUES)
SCRATCH = Access("sparse", Region.SCRATCH)
STAGED = Access("staged_values")


def outlier_chunks(selected_tokens: int) -> int:
    """Outlier chunks of a KV head whose budget is ``selected_tokens`` entries."""
    return selected_tokens * OUTLIERS_PER_1024 // 1024


class ShadowWork:
    """Demand of ShadowKV's own launches, in one layer unless said otherwise.

    Attributes
    ----------
    width
        D: elements of a position's keys, all KV heads joined.
    rank
        Coefficients a position: ``RANK``, or D where that is less.
    key_bytes
        Bytes of one position's keys (or values) on the device; ``host_bytes`` in host memory.
    """

    def __init__(self, parts: Parts) -> None:
        self.model, self.block = parts.model, parts.settings.block_length
        self.forward = parts.forward
        self.width = parts.model.num_kv_heads * parts.model.head_dim
        self.rank = min(RANK, self.width)
        self.key_bytes = parts.forward.device_kv_bytes / 2
        self.host_bytes = parts.forward.host_kv_bytes / 2

    @property
    def coefficient_bytes(self) -> float:
        """Bytes of one position's coefficients."""
        return self.key_bytes * self.rank / self.width

    @property
    def basis_bytes(self) -> float:
        """Bytes of a request's singular vectors."""
        return self.key_bytes * self.rank

    def factor(self, shape: LaunchShape) -> Op:
        """Prefill: K^T K, its eigenvectors, coefficients, and the landmarks in the same pass over the keys."""
        tokens, width = shape.prefix_tokens, self.width
        gram, vectors = 2.0 * tokens * width**2, 9.0 * shape.rows * width**3
        written = tokens * (self.coefficient_bytes + self.key_bytes / CHUNK) + shape.rows * self.basis_bytes
        return Op(
            OpKind.FACTOR,
            tokens,
            gram + vectors + 2.0 * tokens * width * self.rank,
            hbm_bytes=2 * tokens * self.key_bytes + written,
        )

    def fold(self, shape: LaunchShape) -> Op:
        """A completed block's keys to coefficients and landmarks."""
        tokens = shape.rows * self.block
        moved = tokens * (self.key_bytes * (1 + 1 / CHUNK) + self.coefficient_bytes)
        return Op(
            OpKind.FACTOR,
            tokens,
            2.0 * tokens * self.width * self.rank,
            hbm_bytes=moved + shape.rows * self.basis_bytes,
        )

    def score(self, shape: LaunchShape) -> tuple[Op, Op]:
        """Landmarks against the block's queries, and the top-k of chunks."""
        model = self.model
        scores = Op(
            OpKind.PROXY,
            shape.tokens,
            2.0 * shape.prefix_pairs / CHUNK * model.num_heads * model.head_dim,
            hbm_bytes=shape.prefix_tokens / CHUNK * self.key_bytes,
        )
        passes = 2 * shape.prefix_tokens / CHUNK * model.num_kv_heads * LOGIT_BYTES
        return scores, Op(OpKind.TOP_K, shape.rows, hbm_bytes=passes)

    def rebuild(self, shape: LaunchShape) -> Op:
        """Picked keys out of their coefficients: every KV head picks its own positions."""
        entries, heads = shape.selected_tokens, self.model.num_kv_heads
        read = entries * heads * self.coefficient_bytes + shape.rows * self.basis_bytes
        return Op(
            OpKind.REBUILD,
            entries,
            2.0 * entries * self.width * self.rank,
            hbm_bytes=read + entries * self.key_bytes,
        )

    def gather(self, shape: LaunchShape) -> Op:
        """Picked values into a contiguous buffer: read and written once."""
        return Op(OpKind.GATHER, dram_bytes=shape.selected_tokens * (self.host_bytes + self.key_bytes))

    def up(self, entries: int) -> Op:
        """Values of ``entries`` positions to the device."""
        size = entries * self.key_bytes
        return Op(OpKind.COPY, h2d_bytes=size, dram_bytes=size)

    def down(self, entries: int, layers: int) -> Op:
        """Values of ``entries`` positions in each of ``layers`` layers to the host."""
        size = entries * layers * self.key_bytes
        return Op(OpKind.COPY, d2h_bytes=size, dram_bytes=size)


def step_layers(parts: Parts, work: ShadowWork) -> tuple[Stage, ...]:
    """Step 0 layer by layer: pick chunks, rebuild their keys while their values come, attend."""

    def score(shape: LaunchShape, _: int | None) -> Work:
        return once(parts.forward.qkv(shape.tokens), *work.score(shape))

    def gather(shape: LaunchShape, _: int | None) -> Work:
        return once(work.gather(shape))

    def upload(shape: LaunchShape, _: int | None) -> Work:
        return once(work.up(shape.selected_tokens))

    def rebuild(shape: LaunchShape, _: int | None) -> Work:
        return once(work.rebuild(shape))

    def attend(shape: LaunchShape, layer: int | None) -> Work:
        return once(*parts.forward.layer(layer or 0, shape, sparse=True)[1:])

    def stage(
        name: str,
        action: str,
        queue: tuple[str, str],
        launch: Callable[[LaunchShape, int | None], Work],
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
    ) -> Stage:
        return Stage(name, action, *queue, launch, parts.layers, reads=reads, writes=writes)

    picked, gpu = Access("picked"), ("main", "gpu")
    attended = (PICKED_KEYS, PICKED_VALUES, SCRATCH)
    return (
        stage("score", "score_landmarks", gpu, score, (SHADOW_PREFIX,), (picked,)),
        stage("gather", "gather_values", ("gather", "cpu"), gather, (VALUE_PREFIX, picked), (STAGED,)),
        stage("upload", "upload_values", ("h2d", "h2d"), upload, (STAGED, picked), (PICKED_VALUES,)),
        stage("rebuild", "rebuild_keys", gpu, rebuild, (SHADOW_PREFIX, picked), (PICKED_KEYS,)),
        stage("select_step", "shadow_step", gpu, attend, attended, (SCRATCH,)),
    )


def prefill(parts: Parts, work: ShadowWork) -> Section:
    """Each layer of the prompt: its keys are factored where they are, its values leave for the host."""

    def compute(shape: LaunchShape, layer: int | None) -> Work:
        return once(*parts.forward.prefill_layer(layer or 0, shape), work.factor(shape))

    def offload(shape: LaunchShape, _: int | None) -> Work:
        return once(work.down(shape.prefix_tokens, 1))

    ring, layers = Access("prompt", buffer=Buffer.RING), parts.layers
    return Section(
        (
            Stage("prefill", "shadow_prefill", "main", "gpu", compute, layers, writes=(SHADOW_BLOCK, ring)),
            Stage("offload", "offload_values", "d2h", "d2h", offload, layers, reads=(ring,), writes=(VALUE_BLOCK,)),
        )
    )


def block_end(parts: Parts, work: ShadowWork) -> Section:
    """A completed block's keys join the shadow, its values the host's."""
    layers, block, clean = len(parts.layers), parts.settings.block_length, Access("clean")

    def fold(shape: LaunchShape, _: int | None) -> Work:
        return (Repeat(layers, (work.fold(shape),)),)

    def append(shape: LaunchShape, _: int | None) -> Work:
        return once(work.down(shape.rows * block, layers))

    return Section(
        (
            Stage("fold", "fold_keys", "main", "gpu", fold, reads=(clean, SHADOW_PREFIX), writes=(SHADOW_BLOCK,)),
            Stage("append", "append_values", "d2h", "d2h", append, reads=(clean,), writes=(VALUE_BLOCK,)),
        )
    )


def shadow_pools(parts: Parts, work: ShadowWork) -> tuple[Pool, ...]:
    """The shadow on the device, the values in host memory, and what lies between them."""
    layers, heads = len(parts.layers), parts.model.num_kv_heads
    key_bytes = work.key_bytes

    def shadow(request: RequestSize) -> float:
        positions = request.tokens * (work.coefficient_bytes + key_bytes / CHUNK)
        whole = request.selected_tokens * CHUNK * OUTLIERS_PER_1024 / 1024 + (LOCAL_CHUNKS + 1) * CHUNK
        return layers * (positions + whole * key_bytes + work.basis_bytes)

    def indices(request: RequestSize) -> float:
        return layers * heads * request.selected_tokens * 4.0

    return (
        Pool("shadow", Home.HBM, parts.layers, shadow, purpose="low-rank keys, landmarks, keys kept whole"),
        Pool(
            "values",
            Home.DRAM,
            parts.layers,
            lambda request: layers * request.tokens * work.host_bytes,
            pinned=True,
            purpose="the values of the whole KV cache",
        ),
        Pool(
            "staged_values",
            Home.DRAM,
            parts.layers,
            lambda request: request.selected_tokens * key_bytes,
            shared=True,
            pinned=True,
            purpose="gathered values on their way to the device",
        ),
        Pool("picked", Home.HBM, parts.layers, indices, purpose="positions of the picked chunks"),
        Pool(
            "prompt",
            Home.HBM,
            parts.layers,
            lambda request: request.tokens * 2 * key_bytes,
            buffers=2,
            shared=True,
            prompt_only=True,
            purpose="prefill: a layer's KV while it is factored and its values leave",
        ),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Keys are rebuilt beside the fetch of their values; what the fetch takes longer is exposed in step 0.

    A layer's scores wait for the attention of the layer before, so one place between gather and upload is enough.
    """
    if parts.settings.exact_layers:
        raise ConfigError(
            f"exact_layers must be 0 for shadowkv, got {parts.settings.exact_layers}: "
            "it keeps no layer's KV on the GPU in full"
        )
    work = ShadowWork(parts)
    denoise = parts.denoise_sparse(double_buffered=False)
    template = Template(
        streams=(MAIN, GATHER, UPLOAD, DOWNLOAD),
        prefill=(prefill(parts, work),),
        head=(Section(step_layers(parts, work)), parts.decide()),
        denoise=replace(denoise, reads=(*denoise.reads, PICKED_VALUES)),
        first_step=1,
        tail=(block_end(parts, work),),
        edges=(
            *offload_edges("gather"),
            Edge("score", "gather", LayerLink.SAME, why="gather reads what was picked"),
            Edge("gather", "upload", LayerLink.SAME, why="upload reads the gathered values"),
            Edge("upload", "select_step", LayerLink.SAME, why="attention reads the fetched values"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    pools = (
        *shadow_pools(parts, work),
        parts.exact_pool(),
        parts.sparse_pool(1),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the shadow and the host"),
    )
    return template, pools


METHOD = Method(
    "shadowkv",
    "low-rank keys on the GPU pick chunks by landmarks in step 0 and are rebuilt; only values cross the link",
    Axes(
        "values in dram, low-rank keys in hbm",
        "landmarks, gpu, in step 0",
        "selected values up, once a block; prompt's and committed values down",
        "gpu sparse",
        "keys are rebuilt beside the fetch of their values; the rest is exposed in step 0",
        "sparse[1], shadow, staged values",
    ),
    build,
    Settings(budget=0.05, queries=32, exact_layers=0),
    assumptions=(
        "chunks are picked once a block, in step 0, and reused by its other steps (the paper adapts InfiniGen so)",
        f"rank {RANK} of all KV heads' keys joined, or full rank where that is less; chunks of {CHUNK}",
        "scores are softmax(q . landmark / sqrt(d)) summed over the block's queries, then the largest of a KV head's "
        "query heads",
        f"k counts all entries: first the newest {LOCAL_CHUNKS} chunks, then the KV head's outlier chunks "
        f"({OUTLIERS_PER_1024} for 1,024 entries, fixed by the prompt), then chunks by score, the last one cut",
        "keys of outlier and newest chunks stay whole on the GPU; values of every picked entry come from the host",
        "a completed block's keys are projected on the prompt's singular vectors; its values leave at its end",
        "the factors cost K^T K, its eigenvectors and one projection, at the rate of matrix products",
    ),
)
