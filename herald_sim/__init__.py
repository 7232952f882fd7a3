"""The simulator: prices a pipeline on a machine profile, in simulated nanoseconds."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herald_sim.simulate import simulate

__all__ = ["simulate"]


class _Package(ModuleType):
    """The package, with ``simulate`` imported when asked for: ``herald-sim --help`` starts without the event engine.

    A property, because the import system would bind the module of the same name over anything else.
    """

    @property
    def simulate(self) -> Any:
        """The public entry, :func:`herald_sim.simulate.simulate`."""
        from importlib import import_module

        return import_module("herald_sim.simulate").simulate

    @simulate.setter
    def simulate(self, module: ModuleType) -> None:
        """Nothing: the module stays in ``sys.modules``, the name stays the function's."""


sys.modules[__name__].__class__ = _Package
