"""The simulator: prices a pipeline on a machine profile, in simulated nanoseconds."""

from typing import Any

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: `herald-sim --help` starts without the event engine.
    if name == "simulate":
        from herald_sim.simulate import simulate

        return simulate
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
