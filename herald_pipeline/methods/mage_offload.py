"""MAGE-Offload: step 0 streams the full KV to the GPU, attends exactly and selects; the other steps reuse it."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import DOWNLOAD, EXACT, FULL_PREFIX, MAIN, UPLOAD, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import (
    Edge,
    LaunchShape,
    LayerLink,
    Layout,
    Section,
    Stage,
    Template,
    Work,
    once,
)

RING = Access("fetched", buffer=Buffer.RING)


def fetch(parts: Parts) -> Stage:
    """A layer's full KV from host memory into the ring."""
    forward = parts.forward

    def work(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.up(shape.prefix_tokens, Layout.STREAMED))

    return Stage("fetch", "fetch", "h2d", "h2d", work, parts.sparse, reads=(FULL_PREFIX,), writes=(RING,))


def step_layers(parts: Parts) -> tuple[Stage, ...]:
    """Step 0 layer by layer: exact layers (none by default), then those that attend to the fetched KV and select."""
    forward = parts.forward

    def exact(shape: LaunchShape, layer: int | None) -> Work:
        return once(*forward.layer(layer or 0, shape, sparse=False))

    def selecting(shape: LaunchShape, layer: int | None) -> Work:
        ops = forward.layer(layer or 0, shape, sparse=False)
        return once(*ops[:2], forward.top_k(shape), *ops[2:])

    exact_step = Stage(
        "exact_step",
        "exact_step",
        "main",
        "gpu",
        exact,
        parts.exact,
        reads=EXACT,
        writes=(Access("exact", Region.BLOCK),),
    )
    return (
        *((exact_step,) if parts.exact else ()),
        Stage(
            "select_step",
            "select_step",
            "main",
            "gpu",
            selecting,
            parts.sparse,
            reads=(RING,),
            writes=(Access("sparse", Region.SELECTED), Access("sparse", Region.SCRATCH)),
        ),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """The link streams one layer ahead of the GPU; everything waits for it."""
    ring = parts.settings.staging_buffers
    template = Template(
        streams=(MAIN, UPLOAD, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=(Access("exact", Region.BLOCK),)),
        head=(Section((fetch(parts), *step_layers(parts))), parts.decide()),
        denoise=parts.denoise_sparse(double_buffered=False),
        first_step=1,
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("offload", "fetch", block_offset=1, first_only=True, why="fetch reads the prompt"),
            Edge("append", "fetch", block_offset=1, first_only=True, why="fetch reads the last block"),
            Edge("fetch", "select_step", LayerLink.SAME, why="attention reads the fetched layer"),
            Edge("select_step", "fetch", ring=ring, why="the ring's place is free again"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    pools = (
        parts.full(Home.DRAM),
        parts.exact_pool(),
        parts.sparse_pool(1),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        parts.fetched(),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "mage-offload",
    "step 0 streams the full KV to the GPU and selects there; the other steps are sparse",
    Axes(
        "dram",
        "32 queries, gpu, in step 0",
        "full KV up, once a block; committed KV down",
        "step 0 full, then sparse",
        "fetch of layer l + 1 beside layer l",
        "sparse[1], fetched ring",
    ),
    build,
    Settings(budget=0.025, queries=32, exact_layers=0),
    assumptions=(
        "every layer's KV is streamed: the paper keeps two layers in full for HERALD, and says nothing for MAGE",
        "importance is the sum over the B x G query rows of a KV head, not a union",
    ),
)
