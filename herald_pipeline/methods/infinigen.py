"""InfiniGen, adapted to blocks: a proxy on the GPU picks entries in step 0, fetched row by row, once a block.

The proxy scores partial keys that stay on the device; the other steps of the block reuse the selection.
"""

from dataclasses import replace

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import DOWNLOAD, FETCH, FULL_PREFIX, MAIN, Parts
from herald_pipeline.pools import Access, Home, Pool, Region, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LaunchShape, LayerLink, Layout, Section, Stage, Template, Work, once

PARTIAL_BLOCK = Access("partial", Region.BLOCK)


def partial_keys(parts: Parts) -> Pool:
    """Partial keys of every position, all layers: ``proxy_fraction`` of the head dimension."""
    size = len(parts.layers) * parts.forward.device_kv_bytes / 2 * parts.settings.proxy_fraction

    def bytes_per_request(request: RequestSize) -> float:
        return request.tokens * size

    return Pool("partial", Home.HBM, parts.layers, bytes_per_request, purpose="partial keys that the proxy scores")


def step_layers(parts: Parts) -> tuple[Stage, Stage, Stage]:
    """Step 0 layer by layer: scores, fetch of what they pick, attention to it."""
    forward = parts.forward
    selected = Access("sparse", Region.SELECTED)
    scratch = Access("sparse", Region.SCRATCH)

    def score(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.proxy(shape), forward.top_k(shape))

    def fetch(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.up(shape.selected_tokens, Layout.SCATTERED))

    def attend(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.layer(layer or 0, shape, sparse=True))

    layers = parts.layers
    return (
        Stage(
            "proxy",
            "proxy",
            "main",
            "gpu",
            score,
            layers,
            reads=(Access("partial", Region.PREFIX),),
            writes=(Access("picked"),),
        ),
        Stage(
            "fetch",
            "fetch_rows",
            "h2d",
            "h2d",
            fetch,
            layers,
            reads=(FULL_PREFIX, Access("picked")),
            writes=(selected,),
        ),
        Stage(
            "select_step", "sparse_step", "main", "gpu", attend, layers, reads=(selected, scratch), writes=(scratch,)
        ),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """The fetch of a layer is exposed: its attention waits for it."""
    denoise = parts.denoise_sparse(double_buffered=False)
    denoise = replace(denoise, completes=(*denoise.completes, PARTIAL_BLOCK))
    template = Template(
        streams=(MAIN, FETCH, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=(PARTIAL_BLOCK,)),
        head=(Section(step_layers(parts)), parts.decide()),
        denoise=denoise,
        first_step=1,
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("offload", "fetch", block_offset=1, first_only=True, why="fetch reads the prompt"),
            Edge("append", "fetch", block_offset=1, first_only=True, why="fetch reads the last block"),
            Edge("proxy", "fetch", LayerLink.SAME, why="fetch reads what was picked"),
            Edge("fetch", "select_step", LayerLink.SAME, why="attention reads the fetched entries"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    model, layers = parts.model, len(parts.layers)

    def index_bytes(request: RequestSize) -> float:
        return layers * model.num_kv_heads * request.selected_tokens * 4.0

    pools = (
        parts.full(Home.DRAM),
        parts.exact_pool(),
        parts.sparse_pool(1),
        partial_keys(parts),
        Pool("picked", Home.HBM, parts.layers, index_bytes, purpose="indices that the proxy picked"),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "infinigen",
    "a proxy on the GPU picks entries in step 0 and fetches them row by row; the other steps reuse them",
    Axes(
        "dram",
        "proxy, gpu, in step 0",
        "selected KV up row by row, once a block; committed KV down",
        "gpu sparse",
        "none: the fetch is exposed in step 0",
        "sparse[1], partial keys",
    ),
    build,
    Settings(budget=0.20, queries=32, exact_layers=0),
    assumptions=(
        "weights of partial scores are summed over a block's queries and the query heads of a KV head, like exact ones",
        "the kept columns are those of the prompt's own queries, found at prefill",
        "the proxy reads proxy_fraction of the head dimension of every key, kept on the device",
        "selected rows are fetched by index without overlap, as the published rows suggest",
    ),
)
