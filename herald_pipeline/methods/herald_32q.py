"""HERALD with all B queries in selection: what the representative query saves (ablation)."""

from dataclasses import replace

from herald_pipeline.methods.herald import METHOD as HERALD
from herald_pipeline.settings import Settings

METHOD = replace(
    HERALD,
    name="herald-32q",
    summary="HERALD's overlap and draft with all B = 32 queries in selection",
    axes=replace(HERALD.axes, selection="32 queries, cpu, during the previous block"),
    defaults=Settings(budget=0.05, queries=32),
    assumptions=("importance is the sum over the B x G query rows of a KV head",),
)
