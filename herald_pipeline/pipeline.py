"""A pipeline: a model, a method with its settings, and the template and pools that follow. The shared description."""

from dataclasses import dataclass
from typing import Any

from herald_pipeline import methods
from herald_pipeline.methods.base import Method
from herald_pipeline.model import ModelShape
from herald_pipeline.parts import Parts
from herald_pipeline.pools import Pool
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Stage, Template


@dataclass(frozen=True)
class Pipeline:
    """What both interpreters run. Nothing in it depends on a machine."""

    model: ModelShape
    method: Method
    settings: Settings
    template: Template
    pools: tuple[Pool, ...]

    def pool(self, name: str) -> Pool:
        """The pool called ``name``."""
        return next(pool for pool in self.pools if pool.name == name)

    def stage(self, name: str) -> Stage:
        """The stage called ``name``."""
        return next(stage for stage in self.template.stages() if stage.name == name)


def build(model: ModelShape, method: Method | str, **settings: Any) -> Pipeline:
    """Describe ``method`` for ``model``; ``settings`` override the method's defaults by name.

    A method that selects with all of a block's queries does so whatever the block's length.
    """
    chosen = methods.get(method) if isinstance(method, str) else method
    default = chosen.defaults
    if default.queries == default.block_length and "queries" not in settings:
        settings["queries"] = settings.get("block_length", default.block_length)
    resolved = default.replace(**settings)
    template, pools = chosen.build(Parts(model, resolved))
    return Pipeline(model, chosen, resolved, template, pools)
