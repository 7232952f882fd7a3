"""HERALD: selection of block n + 1 on the CPU beside the denoising of block n (paper section IV).

The draft group of step 1 gives block n's KV as if it were finished; one representative [MASK] query of block n + 1
then scores the full prefix and the draft, layer by layer, and the selected entries reach the idle pool before the swap.
"""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import MAIN, RETRIEVAL, Parts
from herald_pipeline.pools import Access, Buffer, Home, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LayerLink, Rows, Section, Template

PREFILL_WRITES = (
    Access("exact", Region.BLOCK),
    Access("sparse", Region.SELECTED, Buffer.IDLE),
)


def transfer_edges(parts: Parts) -> tuple[Edge, ...]:
    """Order within a selection pass: select, then gather, then upload, and reuse of the ring between them."""
    ring = parts.settings.staging_buffers
    if parts.settings.gather == "gpu":
        return (Edge("select", "upload", LayerLink.SAME, why="upload reads the indices"),)
    if parts.settings.gather == "fused":
        return (
            Edge("select", "upload", LayerLink.SAME, why="upload reads the ring's place"),
            Edge("upload", "select", ring=ring, why="the ring's place is free again"),
        )
    return (
        Edge("select", "gather", LayerLink.SAME, why="gather reads the indices"),
        Edge("gather", "upload", LayerLink.SAME, why="upload reads the ring's place"),
        Edge("upload", "gather", ring=ring, why="the ring's place is free again"),
    )


def reuse_edges() -> tuple[Edge, ...]:
    """Order between a slot's last request and the next one: what it left under way still uses the slot's pools."""
    return (
        Edge("append", "prefill", block_offset=1, first_only=True, why="the last block has left the device"),
        Edge("upload", "prefill", block_offset=1, first_only=True, why="a retrieval may outlive an answer that ended"),
    )


def offload_pools(parts: Parts, queries: int, sparse_buffers: int) -> tuple[Pool, ...]:
    """Pools of every method that keeps the full KV in host memory and selects there."""
    clean = parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host")
    return (
        parts.full(Home.DRAM),
        *parts.keys8_pools(),
        parts.exact_pool(),
        parts.sparse_pool(sparse_buffers),
        *((clean,) if sparse_buffers == 1 else ()),
        *((parts.gathered(),) if parts.settings.gather != "gpu" else ()),
        *parts.exchange(queries),
        parts.prompt_ring(),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Two GPU streams that meet at the swap."""
    queries = parts.settings.queries
    retrieval = parts.selection_pass("retrieval", queries=queries, draft=True, buffer=Buffer.IDLE, rows=Rows.NEXT)
    first = retrieval.stages[0].name
    template = Template(
        streams=(MAIN, RETRIEVAL, *parts.copy_streams()),
        prefill=parts.prefill(offload=True, writes=PREFILL_WRITES),
        denoise=parts.denoise_sparse(double_buffered=True, drafting=True),
        draft_step=1,
        after_step={1: (Section((parts.draft_down(),)), retrieval)},
        tail=(Section((parts.append(double_buffered=True), parts.swap())),),
        lookahead=1,
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("denoise", "draft_down", why="the draft group's KV has been computed"),
            Edge("draft_down", first, first_only=True, why="selection reads the draft"),
            *transfer_edges(parts),
            *reuse_edges(),
            Edge("denoise", "append", why="the clean KV has been computed"),
            Edge("upload", "swap", why="the idle pool is complete"),
        ),
    )
    pools = (
        *offload_pools(parts, queries, sparse_buffers=2),
        parts.block_buffer("draft_out", Home.HBM, "the draft's KV on its way to the host"),
        parts.block_buffer("draft", Home.DRAM, "the draft's KV, read by selection only"),
    )
    return template, pools


METHOD = Method(
    "herald",
    "CPU selection of the next block with one representative query over a draft, beside denoising",
    Axes(
        "dram",
        "1 query, cpu, during the previous block",
        "draft and committed KV down; selected KV up, once a block",
        "gpu sparse",
        "retrieval beside main",
        "sparse[active|idle], exact, draft",
    ),
    build,
    Settings(budget=0.05, queries=1),
    assumptions=(
        "the representative is index B // 2 of the next block; indices 15 and 16 tie under equation 2",
        "retrieval starts when the draft's KV of all layers has arrived",
    ),
)
