"""The instruction set in use: chosen once for the machine, shown, lowered by hand.

``HERALD_CPU=portable|avx2|avx512|avx512bf16|amx`` forces a tier; a tier that this build or this machine lacks is an
error, never a silent fallback and never an illegal instruction. A tier counts as usable when the CPU has it *and* the
operating system saves its registers (and, for AMX, gave its permission).
"""

import os
import platform
from typing import Any

from herald_pipeline.errors import ConfigError, unknown_name

from . import _core

_INDEX = {name: index for index, (name, _built, _usable) in enumerate(_core.tiers())}
_chosen: str | None = None


def tier_names() -> list[str]:
    """Every tier there is, slowest first."""
    return list(_INDEX)


def usable_tiers() -> list[str]:
    """Tiers that this build has and this machine can run, slowest first."""
    return [name for name, _built, usable in _core.tiers() if usable]


def _checked(name: str, source: str) -> str:
    if name not in _INDEX:
        raise unknown_name(f"instruction set in {source}", name, _INDEX)
    _name, built, usable = _core.tiers()[_INDEX[name]]
    if not usable:
        why = "this machine or its operating system lacks it" if built else "this build lacks it"
        message = (
            f"{source}={name}: {why}; usable here: {', '.join(usable_tiers())}. "
            f"Unset {source} to take the best of these."
        )
        raise ConfigError(message)
    return name


def active_tier() -> str:
    """Name of the tier that the next call runs.

    Raises
    ------
    ConfigError
        ``HERALD_CPU`` names no tier, or one that cannot run here.
    """
    global _chosen
    if _chosen is None:
        forced = os.environ.get("HERALD_CPU", "")
        _chosen = _checked(forced, "HERALD_CPU") if forced else usable_tiers()[-1]
    return _chosen


def set_tier(name: str | None) -> str:
    """Force a tier for this process; ``None`` returns to ``HERALD_CPU`` or the best. Returns the tier now active."""
    global _chosen
    _chosen = None if name is None else _checked(name, "tier")
    return active_tier()


def tier_index() -> int:
    """The active tier as the extension numbers it."""
    return _INDEX[active_tier()]


def capabilities() -> dict[str, Any]:
    """What the CPU kernels found: tiers built and usable, the active one, threads, vendor."""
    tiers = _core.tiers()
    return {
        "machine": platform.machine(),
        "vendor_intel": _core.is_intel(),
        "built": [name for name, built, _usable in tiers if built],
        "usable": [name for name, _built, usable in tiers if usable],
        "active": active_tier(),
        "threads": _core.default_threads(),
    }
