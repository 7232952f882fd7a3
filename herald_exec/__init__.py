"""The executor: runs a pipeline for real with torch and the CPU kernels."""

from typing import Any

__all__ = ["DecodeRequest", "Options", "Run", "decode", "execute"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: torch takes a second to load.
    if name in __all__:
        from herald_exec import execution

        return getattr(execution, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
