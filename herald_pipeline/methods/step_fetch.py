"""Fig. 3c: every step selects again with a proxy on the GPU and fetches what it picked, one layer ahead.

What autoregressive offloading does, carried over to block diffusion: T times the transfers of one selection a block.
The CPU gathers the picked rows, so that the link moves contiguous bytes. With ``gather=gpu`` the device reads them out
of host memory itself, row by row: then what was picked need not leave it, and no step waits for the host.
"""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.infinigen import partial_keys
from herald_pipeline.methods.layer_prefetch import offload_edges
from herald_pipeline.parts import DOWNLOAD, FETCH, FULL_PREFIX, GATHER, MAIN, UPLOAD, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool, Region, RequestSize
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LaunchShape, LayerLink, Layout, Rows, Section, Stage, Template, Work, once

GATHERED = Access("gathered", buffer=Buffer.RING)
FETCHED = Access("fetched", buffer=Buffer.RING)
PICKED = Access("indices", buffer=Buffer.RING)


def step_stages(parts: Parts) -> tuple[Stage, ...]:
    """Scores, gather and upload run one layer ahead of attention."""
    forward = parts.forward

    def score(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.proxy(shape), forward.top_k(shape))

    def gather(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.gather(shape))

    by_device = parts.settings.gather == "gpu"

    def upload(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.up(shape.selected_tokens, Layout.ROWS if by_device else Layout.CONTIGUOUS))

    def attend(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.layer(layer or 0, shape, sparse=True))

    layers = parts.layers
    proxy = Stage(
        "proxy",
        "proxy",
        "main",
        "gpu",
        score,
        layers,
        Rows.RUNNING,
        reads=(Access("partial", Region.PREFIX),),
        writes=(PICKED,),
        lead=1,
    )
    gathering = Stage(
        "gather",
        "gather",
        "gather",
        "cpu",
        gather,
        layers,
        Rows.RUNNING,
        reads=(FULL_PREFIX, PICKED),
        writes=(GATHERED,),
        lead=1,
    )
    uploading = Stage(
        "upload",
        "fetch_rows" if by_device else "upload",
        "h2d",
        "h2d",
        upload,
        layers,
        Rows.RUNNING,
        reads=(FULL_PREFIX, PICKED) if by_device else (GATHERED,),
        writes=(FETCHED,),
        lead=1,
    )
    step = Stage(
        "step_layer",
        "step_layer",
        "main",
        "gpu",
        attend,
        layers,
        Rows.RUNNING,
        reads=(FETCHED,),
        completes=(Access("clean"), Access("partial", Region.BLOCK)),
    )
    return (proxy, uploading, step) if by_device else (proxy, gathering, uploading, step)


def fetched_entries(parts: Parts) -> Pool:
    """Ring in device memory that takes one layer's picked entries a place, and the block's own KV behind them."""
    size = parts.forward.device_kv_bytes

    def bytes_per_request(request: RequestSize) -> float:
        return (request.selected_tokens + request.block_length) * size

    return Pool(
        "fetched",
        Home.HBM,
        parts.layers,
        bytes_per_request,
        buffers=parts.settings.staging_buffers,
        shared=True,
        purpose="a layer's picked entries",
    )


def picked_ring(parts: Parts) -> Pool:
    """Indices that the proxy picked, on their way to whoever gathers: one layer a place."""
    heads, by_device = parts.model.num_kv_heads, parts.settings.gather == "gpu"
    return Pool(
        "indices",
        Home.HBM if by_device else Home.DRAM,
        parts.layers,
        lambda request: heads * request.selected_tokens * 4.0,
        buffers=parts.settings.staging_buffers,
        shared=True,
        pinned=not by_device,
    )


def _fetch_edges(ring: int, by_device: bool) -> tuple[Edge, ...]:
    """From what was picked to the place on the device that attention reads."""
    if by_device:
        return (
            Edge("proxy", "upload", LayerLink.SAME, why="the device fetches what was picked"),
            Edge("upload", "proxy", ring=ring, why="the indices' place is free again"),
        )
    return (
        Edge("proxy", "gather", LayerLink.SAME, why="gather reads the indices"),
        Edge("gather", "proxy", ring=ring, why="the indices' place is free again"),
        Edge("gather", "upload", LayerLink.SAME, why="upload reads the ring's place"),
        Edge("upload", "gather", ring=ring, why="the ring's place is free again"),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Transfers hide behind one layer's compute; the rest is exposed in every step."""
    ring, by_device = parts.settings.staging_buffers, parts.settings.gather == "gpu"
    template = Template(
        streams=(MAIN, FETCH, DOWNLOAD) if by_device else (MAIN, GATHER, UPLOAD, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=(Access("partial", Region.BLOCK),)),
        step=(Section(step_stages(parts)),),
        denoise=parts.decide_step(),
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            *offload_edges("upload" if by_device else "gather"),
            *_fetch_edges(ring, by_device),
            Edge("upload", "step_layer", LayerLink.SAME, why="attention reads the fetched entries"),
            Edge("step_layer", "upload", ring=ring, why="the place on the device is free again"),
            Edge("decide", "append", why="the clean KV has been computed"),
        ),
    )
    pools = (
        parts.full(Home.DRAM),
        partial_keys(parts),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        *(() if by_device else (parts.gathered(),)),
        picked_ring(parts),
        fetched_entries(parts),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "step-fetch",
    "every step selects with a proxy and fetches 5% of the KV, one layer ahead of the GPU (Fig. 3c)",
    Axes(
        "dram",
        "proxy, gpu, every step",
        "selected KV up, every step; committed KV down",
        "gpu sparse",
        "gather and upload of layer l + 1 beside layer l; the rest exposed",
        "gathered and fetched rings, partial keys",
    ),
    build,
    Settings(budget=0.05, exact_layers=0, queries=32),
    assumptions=(
        "the proxy is InfiniGen's; unless gather=gpu the CPU gathers, so that the link runs at its contiguous rate",
        "nothing selected in one step is kept for the next",
    ),
)
