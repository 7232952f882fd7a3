"""Fits beside a profile: ``hw_profiles/fits/PROFILE.NAME.json``, which ``calibration.fit_published`` writes."""

import json
from pathlib import Path
from typing import Any

from herald_pipeline import hardware_io
from herald_pipeline.hardware import Profile

ALL = "all"
"""The fit whose numbers the profile holds."""


def files(profile: Profile) -> dict[str, Path]:
    """Fits of a profile by name."""
    folder = hardware_io.profile_dir() / "fits"
    found = sorted(folder.glob(f"{profile.name}.*.json"))
    return {path.name.removeprefix(f"{profile.name}.").removesuffix(".json"): path for path in found}


def read(path: Path) -> dict[str, Any]:
    """One fit: ``names``, ``values``, ``covariance`` of their logarithms, ``errors`` by target, and what it saw."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
