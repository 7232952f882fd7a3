"""Fig. 3b: the full KV crosses the link in every step, one layer ahead of the GPU, which attends exactly."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import DOWNLOAD, FULL_PREFIX, MAIN, UPLOAD, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LaunchShape, LayerLink, Layout, Rows, Section, Stage, Template, Work, once

RING = Access("fetched", buffer=Buffer.RING)


def fetch(parts: Parts) -> Stage:
    """A layer's full KV from host memory into the ring."""
    forward = parts.forward

    def work(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.up(shape.prefix_tokens, Layout.CONTIGUOUS))

    return Stage("fetch", "fetch", "h2d", "h2d", work, parts.layers, Rows.RUNNING, reads=(FULL_PREFIX,), writes=(RING,))


def step_layer(parts: Parts) -> Stage:
    """One layer of a step over the fetched KV; a completed block leaves its clean KV for the host."""
    forward = parts.forward

    def work(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.layer(layer or 0, shape, sparse=False))

    return Stage(
        "step_layer",
        "step_layer",
        "main",
        "gpu",
        work,
        parts.layers,
        Rows.RUNNING,
        reads=(RING,),
        completes=(Access("clean"),),
    )


def offload_edges(first: str) -> tuple[Edge, ...]:
    """Order of prefill, append and the block's first reader of the full pool."""
    return (
        Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
        Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
        Edge("offload", first, block_offset=1, first_only=True, why=f"{first} reads the prompt"),
        Edge("append", first, block_offset=1, first_only=True, why=f"{first} reads the last block"),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """The link is always busy; the GPU waits for it."""
    ring = parts.settings.staging_buffers
    template = Template(
        streams=(MAIN, UPLOAD, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=()),
        step=(Section((fetch(parts), step_layer(parts))),),
        denoise=parts.decide_step(),
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            *offload_edges("fetch"),
            Edge("fetch", "step_layer", LayerLink.SAME, why="attention reads the fetched layer"),
            Edge("step_layer", "fetch", ring=ring, why="the ring's place is free again"),
            Edge("decide", "append", why="the clean KV has been computed"),
        ),
    )
    pools = (
        parts.full(Home.DRAM),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        parts.fetched(),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "layer-prefetch",
    "full KV in host memory, fetched layer by layer in every step; exact attention on the GPU (Fig. 3b)",
    Axes(
        "dram",
        "none",
        "full KV up, every step; committed KV down",
        "gpu full",
        "fetch of layer l + 1 beside layer l",
        "fetched ring",
    ),
    build,
    Settings(budget=1.0, exact_layers=0),
)
