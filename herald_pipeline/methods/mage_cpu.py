"""MAGE with selection on the CPU: step 0 attends to the full KV there with all B queries (ablation, Fig. 13)."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.herald import offload_pools, transfer_edges
from herald_pipeline.parts import HIDDEN, MAIN, RETRIEVAL, Parts
from herald_pipeline.pools import Access, Buffer, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LayerLink, Rows, Section, Template


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Step 0 and the sparse steps wait for one another, whichever stream they are on.

    Step 0 is not on the steps' own stream: there it would hold up those of the batch's other half, too.
    """
    queries = parts.settings.block_length
    step_0 = parts.selection_pass(
        "retrieval", queries=queries, draft=False, buffer=Buffer.ONE, rows=Rows.COHORT, decides=True
    )
    first = step_0.stages[0].name
    template = Template(
        streams=(MAIN, RETRIEVAL, *parts.copy_streams()),
        prefill=parts.prefill(offload=True, writes=(Access("exact", Region.BLOCK),)),
        head=(step_0, parts.decide(reads=(HIDDEN,))),
        denoise=parts.denoise_sparse(double_buffered=False),
        first_step=1,
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("offload", first, block_offset=1, first_only=True, why="selection reads the prompt"),
            Edge("append", first, block_offset=1, first_only=True, why="selection reads the last block"),
            *transfer_edges(parts),
            Edge("finish", "decide", why="the LM head reads what the last layer leaves"),
            Edge("upload", "denoise", first_only=True, why="the sparse pool is complete"),
            Edge("denoise", "append", why="the clean KV has been computed"),
        ),
    )
    return template, (*offload_pools(parts, queries, sparse_buffers=1), parts.hidden())


METHOD = Method(
    "mage-cpu",
    "step 0 attends to the full KV on the CPU with all B queries and selects; then sparse steps",
    Axes(
        "dram",
        "32 queries, cpu, in step 0",
        "queries and committed KV down; outputs and selected KV up, once a block",
        "step 0 on the cpu, then gpu sparse",
        "gather and upload beside the FFN",
        "sparse[1], exact",
    ),
    build,
    Settings(budget=0.05, queries=32),
    assumptions=("importance is the sum over the B x G query rows of a KV head, not a union",),
)
