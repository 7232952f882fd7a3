"""CPU selection with the representative query, in a pass of its own before step 0 (ablation, Fig. 13)."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.herald import offload_pools, transfer_edges
from herald_pipeline.parts import MAIN, RETRIEVAL, Parts
from herald_pipeline.pools import Access, Buffer, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LayerLink, Rows, Section, Template


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Serial: the pass of one token, then T sparse steps and the completing forward; streams as in ``mage-cpu``."""
    queries = parts.settings.queries
    selection = parts.selection_pass("retrieval", queries=queries, draft=False, buffer=Buffer.ONE, rows=Rows.COHORT)
    first = selection.stages[0].name
    template = Template(
        streams=(MAIN, RETRIEVAL, *parts.copy_streams()),
        prefill=parts.prefill(offload=True, writes=(Access("exact", Region.BLOCK),)),
        head=(selection,),
        denoise=parts.denoise_sparse(double_buffered=False),
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("offload", first, block_offset=1, first_only=True, why="selection reads the prompt"),
            Edge("append", first, block_offset=1, first_only=True, why="selection reads the last block"),
            *transfer_edges(parts),
            Edge("upload", "denoise", first_only=True, why="the sparse pool is complete"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    return template, offload_pools(parts, queries, sparse_buffers=1)


METHOD = Method(
    "mage-cpu-representative",
    "CPU selection with one representative query before step 0; nothing overlaps it",
    Axes(
        "dram",
        "1 query, cpu, before step 0",
        "committed KV down; selected KV up, once a block",
        "gpu sparse",
        "gather and upload beside the FFN",
        "sparse[1], exact",
    ),
    build,
    Settings(budget=0.05, queries=1),
)
