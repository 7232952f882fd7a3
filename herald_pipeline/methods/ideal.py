"""Fig. 3d: selection and transfers cost nothing; only the sparse forward is left. An upper bound, not a system."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import DOWNLOAD, MAIN, Parts
from herald_pipeline.pools import Access, Home, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LayerLink, Section, Template


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """One sparse pool that is always right, for free."""
    writes = (Access("exact", Region.BLOCK), Access("sparse", Region.SELECTED))
    template = Template(
        streams=(MAIN, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=writes),
        denoise=parts.denoise_sparse(double_buffered=False),
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(
            Edge("prefill", "offload", LayerLink.SAME, why="offload reads the computed KV"),
            Edge("offload", "prefill", ring=2, why="the prompt ring's place is free again"),
            Edge("denoise", "append", why="the clean KV has been computed"),
            Edge("append", "denoise", block_offset=1, first_only=True, why="the clean KV's place is free again"),
        ),
    )
    pools = (
        parts.full(Home.DRAM),
        parts.exact_pool(),
        parts.sparse_pool(1),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "ideal",
    "sparse attention whose selection and transfers cost nothing: the forward alone (Fig. 3d)",
    Axes("dram", "free", "committed KV down", "gpu sparse", "ideal", "sparse[1], exact"),
    build,
    Settings(budget=0.05),
    assumptions=("an upper bound: the right entries are in the pool at no cost",),
    simulated_only=True,
    timed_on_synthetic_kv=True,
)
