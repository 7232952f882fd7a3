"""Methods by name. Adding one is adding a module here (its name with underscores, ``METHOD`` in it) and its test."""

from importlib import import_module
from pkgutil import iter_modules

from herald_pipeline.errors import unknown_name
from herald_pipeline.methods.base import Axes, Method

__all__ = ["Axes", "Method", "get", "names"]


def names() -> tuple[str, ...]:
    """Every method's name, sorted."""
    modules = (module.name for module in iter_modules(__path__))
    return tuple(sorted(name.replace("_", "-") for name in modules if name != "base"))


def get(name: str) -> Method:
    """The method called ``name``; an unknown name is refused with the closest one."""
    if name not in names():
        raise unknown_name("method", name, names())
    module = import_module(f"{__name__}.{name.replace('-', '_')}")
    method = module.METHOD
    assert isinstance(method, Method)
    return method
