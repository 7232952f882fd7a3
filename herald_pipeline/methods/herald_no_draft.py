"""HERALD without the draft: selection of block n + 1 sees the prefix before block n only (Fig. 7, "omitted").

Nothing of block n is needed, so the retrieval of block n + 1 starts with block n itself.
"""

from dataclasses import replace

from herald_pipeline.methods.base import Method
from herald_pipeline.methods.herald import (
    METHOD as HERALD,
)
from herald_pipeline.methods.herald import (
    PREFILL_WRITES,
    offload_pools,
    reuse_edges,
    transfer_edges,
)
from herald_pipeline.parts import MAIN, RETRIEVAL, Parts
from herald_pipeline.pools import Buffer, Pool
from herald_pipeline.stages import Edge, LayerLink, Rows, Section, Template


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """As HERALD's, with the retrieval pass at the block's head and no draft group."""
    queries = parts.settings.queries
    retrieval = parts.selection_pass("retrieval", queries=queries, draft=False, buffer=Buffer.IDLE, rows=Rows.NEXT)
    first = retrieval.stages[0].name
    # Nobody reads the indices behind a selection that gathers by itself.
    free = Edge("swap", first, block_offset=1, first_only=True, why="the indices of the last pass are free")
    indices_free = () if parts.settings.gather == "fused" else (free,)
    template = Template(
        streams=(MAIN, RETRIEVAL, *parts.copy_streams()),
        prefill=parts.prefill(offload=True, writes=PREFILL_WRITES),
        head=(retrieval,),
        denoise=parts.denoise_sparse(double_buffered=True),
        tail=(Section((parts.append(double_buffered=True), parts.swap())),),
        lookahead=1,
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("offload", first, block_offset=1, first_only=True, why="selection reads the prompt"),
            Edge("append", first, block_offset=1, first_only=True, why="selection reads the last block"),
            *indices_free,
            *transfer_edges(parts),
            *reuse_edges(),
            Edge("denoise", "append", why="the clean KV has been computed"),
            Edge("upload", "swap", why="the idle pool is complete"),
        ),
    )
    return template, offload_pools(parts, queries, sparse_buffers=2)


METHOD: Method = replace(
    HERALD,
    name="herald-no-draft",
    summary="HERALD with block n left out of selection: overlap from the block's first step",
    axes=replace(
        HERALD.axes,
        link="committed KV down; selected KV up, once a block",
        pools="sparse[active|idle], exact",
    ),
    build=build,
)
