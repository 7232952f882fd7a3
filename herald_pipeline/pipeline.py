"""A pipeline: a model, a method with its settings, and the template and pools that follow. The shared description."""

from dataclasses import dataclass
from typing import Any

from herald_pipeline import methods
from herald_pipeline.errors import ConfigError, raise_problems
from herald_pipeline.methods.base import Method
from herald_pipeline.model import ModelShape
from herald_pipeline.parts import Parts
from herald_pipeline.pools import Pool
from herald_pipeline.settings import Settings
from herald_pipeline.stages import SELECTIONS, LaunchShape, Stage, Template


@dataclass(frozen=True)
class Pipeline:
    """What both interpreters run. Nothing in it depends on a machine."""

    model: ModelShape
    method: Method
    settings: Settings
    template: Template
    pools: tuple[Pool, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the method assumes, and what the settings do beyond the paper."""
        if self.settings.keys == "full":
            return self.method.assumptions
        reads = {
            "key-only": "keys and the selected entries' values",
            "int8": "8-bit copies of the keys, the candidates' keys and the selected entries' values",
        }[self.settings.keys]
        beyond = f"beyond the paper: keys={self.settings.keys}, selection reads {reads}; exact layers are read in full"
        return (*self.method.assumptions, beyond)

    def pool(self, name: str) -> Pool:
        """The pool called ``name``."""
        return next(pool for pool in self.pools if pool.name == name)

    def stage(self, name: str) -> Stage:
        """The stage called ``name``."""
        return next(stage for stage in self.template.stages() if stage.name == name)


def scanned_bytes(pipeline: Pipeline, rows: int, context: int) -> float:
    """Bytes of host memory that one selection pass reads, of ``rows`` requests with ``context`` entries each."""
    selected = rows * pipeline.settings.selected_tokens(context)
    shape = LaunchShape(rows, rows, 0, rows * context, selected, 0, 0, 0)
    work = [
        repeat
        for stage in pipeline.template.stages()
        if stage.action == "select"
        for layer in stage.layers
        for repeat in stage.work(shape, layer)
    ]
    return sum(repeat.count * op.dram_bytes for repeat in work for op in repeat.ops if op.kind in SELECTIONS)


_OF_ONE_METHOD = {
    "proxy_fraction": "infinigen",
    "retrieval_fraction": "specontext",
    "selection_overlap": "specontext",
    "window_blocks": "herald-sliding",
}
"""Settings that a single method reads."""


def _check_settings(model: ModelShape, method: Method, settings: Settings) -> None:
    """Refuse what the method or the model would ignore."""
    problems: list[str | None] = [
        f"settings.{name} is a setting of {owner} and changes nothing with {method.name}"
        for name, owner in _OF_ONE_METHOD.items()
        if method.name != owner and getattr(settings, name) != getattr(method.defaults, name)
    ]
    raise_problems(problems)


_LAYERS_LEFT = frozenset({"sparse", "gathered", "fetched"})
"""Pools of what is selected or fetched: they hold the layers that are not exact."""


def _check_exact_layers(model: ModelShape, method: Method, settings: Settings, pools: tuple[Pool, ...]) -> None:
    """Refuse a method that is left no layer to select for; where it selects for none, all may be exact."""
    given = f"the layers of {model.name}, got {settings.exact_layers}"
    if any(pool.name in _LAYERS_LEFT and not pool.layers for pool in pools):
        message = (
            f"settings.exact_layers must be < {model.num_layers}, {given}: no layer is left to select for; "
            "use fewer, or method dense"
        )
        raise ConfigError(message)
    if settings.exact_layers > max(model.num_layers, method.defaults.exact_layers):
        raise ConfigError(f"settings.exact_layers must be <= {model.num_layers}, {given}")


def build(model: ModelShape, method: Method | str, **settings: Any) -> Pipeline:
    """Describe ``method`` for ``model``; ``settings`` override the method's defaults by name.

    A method that selects with all of a block's queries does so whatever the block's length.
    """
    chosen = methods.get(method) if isinstance(method, str) else method
    default = chosen.defaults
    if default.queries == default.block_length and "queries" not in settings:
        settings["queries"] = settings.get("block_length", default.block_length)
    resolved = default.replace(**settings)
    _check_settings(model, chosen, resolved)
    template, pools = chosen.build(Parts(model, resolved))
    _check_exact_layers(model, chosen, resolved, pools)
    names = {stage.name for stage in template.stages()}
    # What a proxy on the device picked cannot be gathered within a selection of the CPU.
    brings = "upload" in names and ("select" in names or resolved.gather == "gpu")
    if resolved.gather != "cpu" and not brings:
        message = (
            f"gather={resolved.gather} says how entries that the CPU selected are brought together, and {chosen.name} "
            "brings none; use gather=cpu, or a method such as herald"
        )
        raise ConfigError(message)
    if resolved.keys != "full" and not any(stage.name == "select" for stage in template.stages()):
        message = (
            f"keys={resolved.keys} says how the CPU's selection reads KV, and {chosen.name} selects nothing there; "
            "use keys=full, or a method such as herald"
        )
        raise ConfigError(message)
    return Pipeline(model, chosen, resolved, template, pools)
