"""Fig. 3a: exact attention on the CPU, where the full KV lives, in every layer of every step; the GPU does the rest."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.methods.layer_prefetch import offload_edges
from herald_pipeline.parts import DOWNLOAD, FULL_PREFIX, MAIN, Parts
from herald_pipeline.pools import Access, Home, Pool
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Edge, LaunchShape, Rows, Section, Stage, Template, Work, once


def step_stages(parts: Parts) -> tuple[Stage, ...]:
    """Project on the GPU, attend on the CPU, finish on the GPU: one after another, nothing overlaps.

    The actions are those of a selection pass; the names are not, because this is the forward itself and no retrieval.
    """
    forward, block = parts.forward, parts.settings.block_length

    def project(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.qkv(shape.tokens), forward.down_queries(shape.tokens))

    def attend(shape: LaunchShape, _: int | None) -> Work:
        return once(forward.select(shape, block, draft=False, keeps=False))

    def finish(shape: LaunchShape, layer: int | None) -> Work:
        n = shape.tokens
        return once(forward.up_outputs(n), forward.output(n), *forward.ffn(n, layer or 0))

    return (
        Stage(
            "step_project",
            "project",
            "main",
            "gpu",
            project,
            parts.layers,
            Rows.RUNNING,
            writes=(Access("query"),),
            completes=(Access("clean"),),
        ),
        Stage(
            "step_attend",
            "select",
            "main",
            "cpu",
            attend,
            parts.layers,
            Rows.RUNNING,
            reads=(FULL_PREFIX, Access("query")),
            writes=(Access("output"),),
        ),
        Stage("step_finish", "finish", "main", "gpu", finish, parts.layers, Rows.RUNNING, reads=(Access("output"),)),
    )


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """Serial: queries down, attention, outputs up, layer after layer."""
    query, output, _ = parts.exchange(parts.settings.block_length)
    template = Template(
        streams=(MAIN, DOWNLOAD),
        prefill=parts.prefill(offload=True, writes=()),
        step=(Section(step_stages(parts)),),
        denoise=parts.decide_step(),
        tail=(Section((parts.append(double_buffered=False),)),),
        edges=(*offload_edges("step_attend"), Edge("decide", "append", why="the clean KV has been computed")),
    )
    pools = (
        parts.full(Home.DRAM),
        parts.block_buffer("clean", Home.HBM, "a completed block's KV on its way to the host"),
        query,
        output,
        parts.prompt_ring(),
    )
    return template, pools


METHOD = Method(
    "cpu-exact",
    "full KV in host memory, exact attention there in every step; the GPU computes everything else (Fig. 3a)",
    Axes(
        "dram",
        "none",
        "queries down, outputs up, each step and layer; committed KV down",
        "cpu full",
        "none",
        "query and output buffers",
    ),
    build,
    Settings(budget=1.0, exact_layers=0, queries=32),
    assumptions=("attention on the CPU costs what the selection kernel costs with B queries, without top-k",),
)
