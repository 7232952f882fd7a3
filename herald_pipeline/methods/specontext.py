"""SpeContext, adapted to blocks: a small retrieval model picks entries before the forward, only what is new is fetched.

A pruned, distilled model reads the block before the main model does and gives every KV head its positions, the same in
all layers. They are known before layer 0, so fetches run ahead of the layers that use them; entries that the previous
block's selection already brought stay where they are (elastic loading). Times and volumes only: the retrieval model
would have to be trained.
"""

from herald_pipeline.errors import ConfigError
from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.layer_prefetch import offload_edges
from herald_pipeline.parts import DOWNLOAD, FULL_PREFIX, GATHER, MAIN, UPLOAD, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool, Region, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.stages import (
    Edge,
    LaunchShape,
    LayerLink,
    Layout,
    Op,
    OpKind,
    Section,
    Stage,
    Template,
    Work,
    once,
)
from herald_pipeline.work import LOGIT_BYTES, WEIGHT_BYTES

RETRIEVAL_BLOCK = Access("retrieval_keys", Region.BLOCK)
SELECTED, SCRATCH = Access("sparse", Region.SELECTED), Access("sparse", Region.SCRATCH)
GATHERED = Access("gathered", buffer=Buffer.RING)
PICKED = Access("picked")


def retrieval_params(parts: Parts) -> float:
    """Parameters of the retrieval model: ``retrieval_fraction`` of those that a token passes in the main model."""
    return parts.settings.retrieval_fraction * parts.model.active_params


def retrieval_model(parts: Parts, shape: LaunchShape) -> Work:
    """The block through the retrieval model: its weights, its keys of the whole prefix once, one top-k."""
    model, params = parts.model, retrieval_params(parts)
    weights = params * WEIGHT_BYTES
    flops = 2.0 * shape.prefix_pairs * model.num_heads * model.head_dim
    keys = shape.prefix_tokens * parts.forward.device_kv_bytes / 2
    scores = 2 * shape.prefix_tokens * model.num_kv_heads * LOGIT_BYTES
    return once(
        # As a projection, so that the engine's fixed cost of one layer is counted.
        Op(OpKind.QKV, shape.tokens, 2.0 * shape.tokens * params, hbm_bytes=weights, weight_bytes=weights),
        Op(OpKind.PROXY, shape.tokens, flops, hbm_bytes=keys),
        Op(OpKind.TOP_K, shape.rows, hbm_bytes=scores),
    )


def retrieve(parts: Parts) -> Section:
    """Positions for all layers, before layer 0."""

    def work(shape: LaunchShape, _: int | None) -> Work:
        return retrieval_model(parts, shape)

    reads = (Access("retrieval_keys", Region.PREFIX),)
    return Section((Stage("retrieve", "retrieve", "main", "gpu", work, reads=reads, writes=(PICKED,)),))


def step_layers(parts: Parts) -> Section:
    """Step 0: what is new in a layer's selection is gathered and sent as early as the streams allow."""
    forward, new_share = parts.forward, 1.0 - parts.settings.selection_overlap
    entry_bytes = forward.device_kv_bytes

    def gather(shape: LaunchShape, _: int | None) -> Work:
        entries = shape.selected_tokens * new_share
        return once(Op(OpKind.GATHER, dram_bytes=entries * (forward.host_kv_bytes + entry_bytes)))

    def upload(shape: LaunchShape, _: int | None) -> Work:
        size = shape.selected_tokens * new_share * entry_bytes
        return once(Op(OpKind.COPY, h2d_bytes=size, dram_bytes=size, layout=Layout.CONTIGUOUS))

    def attend(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.layer(layer or 0, shape, sparse=True))

    layers = parts.layers
    return Section(
        (
            Stage(
                "gather", "gather_new", "gather", "cpu", gather, layers, reads=(FULL_PREFIX, PICKED), writes=(GATHERED,)
            ),
            Stage("upload", "upload_new", "h2d", "h2d", upload, layers, reads=(GATHERED, PICKED), writes=(SELECTED,)),
            Stage(
                "select_step",
                "sparse_step",
                "main",
                "gpu",
                attend,
                layers,
                reads=(SELECTED, SCRATCH),
                writes=(SCRATCH,),
            ),
        )
    )


def block_end(parts: Parts) -> Section:
    """The completed block through the retrieval model, for its keys, and the block's KV to the host."""
    params = retrieval_params(parts)

    def work(shape: LaunchShape, _: int | None) -> Work:
        tokens, weights = shape.rows * parts.settings.block_length, params * WEIGHT_BYTES
        return once(Op(OpKind.QKV, tokens, 2.0 * tokens * params, hbm_bytes=weights, weight_bytes=weights))

    extend = Stage("extend", "extend_retrieval", "main", "gpu", work, writes=(RETRIEVAL_BLOCK,))
    return Section((extend, parts.append(double_buffered=False)))


def prefill(parts: Parts) -> tuple[Section, ...]:
    """The prompt through both models; block 0's first selection stays behind, and later ones differ from it."""
    (section,) = parts.prefill(offload=True, writes=(SELECTED,))
    params = retrieval_params(parts)

    def work(shape: LaunchShape, _: int | None) -> Work:
        tokens, weights = shape.prefix_tokens, params * WEIGHT_BYTES
        return once(Op(OpKind.QKV, tokens, 2.0 * tokens * params, hbm_bytes=weights, weight_bytes=weights))

    read_prompt = Stage("read_prompt", "extend_retrieval", "main", "gpu", work, writes=(RETRIEVAL_BLOCK,))
    return section, Section((read_prompt,))


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Fetches run beside the layers before the one that waits for them."""
    settings = parts.settings
    if settings.exact_layers:
        raise ConfigError(
            f"exact_layers must be 0 for specontext, got {settings.exact_layers}: "
            "its positions are the same in all layers, none is attended to in full"
        )
    template = Template(
        streams=(MAIN, GATHER, UPLOAD, DOWNLOAD),
        prefill=prefill(parts),
        head=(retrieve(parts), step_layers(parts), parts.decide()),
        denoise=parts.denoise_sparse(double_buffered=False),
        first_step=1,
        tail=(block_end(parts),),
        edges=(
            *offload_edges("gather"),
            Edge("retrieve", "gather", first_only=True, why="gather reads the picked positions"),
            Edge("gather", "upload", LayerLink.SAME, why="upload reads the ring's place"),
            Edge("upload", "gather", ring=settings.staging_buffers, why="the ring's place is free again"),
            Edge("upload", "select_step", LayerLink.SAME, why="attention reads the fetched entries"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    heads, key_bytes = parts.model.num_kv_heads, parts.forward.device_kv_bytes / 2

    def picked(request: RequestSize) -> float:
        return heads * request.selected_tokens * 4.0

    pools = (
        parts.full(Home.DRAM),
        parts.exact_pool(),
        parts.sparse_pool(1),
        Pool(
            "retrieval_weights",
            Home.HBM,
            parts.layers,
            lambda _: retrieval_params(parts) * WEIGHT_BYTES,
            shared=True,
            fixed=True,
            purpose="weights of the retrieval model",
        ),
        Pool(
            "retrieval_keys",
            Home.HBM,
            parts.layers,
            lambda request: request.tokens * key_bytes,
            purpose="keys of the retrieval model's one layer",
        ),
        Pool("picked", Home.HBM, parts.layers, picked, purpose="positions that the retrieval model picked"),
        parts.gathered(),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "specontext",
    "a small retrieval model picks entries for all layers before step 0; only what is new crosses the link",
    Axes(
        "dram",
        "retrieval model, gpu, before step 0",
        "newly selected KV up, once a block; committed KV down",
        "gpu sparse",
        "fetches run ahead of the layers of step 0; the rest is exposed there",
        "sparse[1], gathered ring, retrieval keys",
    ),
    build,
    Settings(budget=0.05, queries=32, exact_layers=0),
    assumptions=(
        "times and volumes only: the retrieval model is not trained, and nothing is said about what it selects",
        "it is a dense model of one layer with retrieval_fraction of the main model's active parameters and its KV "
        "heads; 0.1 is an upper bound, as the paper prunes over nine tenths of a model smaller than the main one",
        "it reads the prompt, each block before step 0, and each completed block; its keys stay on the GPU",
        "positions are per KV head and the same in all layers, picked once a block (the paper adapts InfiniGen so)",
        "selection_overlap of a block's entries are there from the block before: 0 unless set, an upper bound of the "
        "transfers, because for consecutive blocks no figure has been published",
        "no layer's KV stays on the GPU in full: the paper's memory model, which would keep some, is left out",
    ),
    simulated_only=True,
)
