"""Dense: everything on the GPU, every step attends to the full KV cache (the paper's baseline)."""

from herald_pipeline.methods.base import Axes, Method
from herald_pipeline.parts import MAIN, Parts
from herald_pipeline.pools import Access, Home, Pool, Region
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Template


def build(parts: Parts) -> tuple[Template, tuple[Pool, ...]]:
    """One stream, one pool."""
    template = Template(
        streams=(MAIN,),
        denoise=parts.denoise_dense(),
        prefill=parts.prefill(offload=False, writes=(Access("full", Region.BLOCK),)),
    )
    return template, (parts.full(Home.HBM),)


METHOD = Method(
    "dense",
    "GPU only: full KV in device memory, exact attention in every step",
    Axes("hbm", "none", "nothing", "gpu full", "none", "full"),
    build,
    Settings(budget=1.0),
)
