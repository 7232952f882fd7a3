"""How honest the fit is: errors of values that it saw and of values that it did not, and how far its numbers are known.

``hw_profiles/fits/PROFILE.NAME.json`` is what ``python -m calibration.fit_published --out`` wrote.
"""

import json
from pathlib import Path
from typing import Any

from herald_pipeline import hardware_io
from herald_pipeline.hardware import Profile
from herald_sim.exhibits.targets import FIT, HELD_OUT, targets

ALL = "all"


def files(profile: Profile) -> dict[str, Path]:
    """Fits of a profile by name; ``all`` is the one whose numbers the profile holds."""
    folder = hardware_io.profile_dir() / "fits"
    found = sorted(folder.glob(f"{profile.name}.*.json"))
    return {path.name.removeprefix(f"{profile.name}.").removesuffix(".json"): path for path in found}


def read(path: Path) -> dict[str, Any]:
    """One fit."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a fit and value: printed, predicted, error, and whether that fit saw it."""
    printed = {target.key: target.published for target in targets()}
    found = []
    for name, path in files(profile).items():
        fit = read(path)
        for key, error in fit["errors"].items():
            if key in printed:
                value = printed[key] * (1 + error)
                kind = FIT if key in fit["fitted"] else HELD_OUT
                found.append(
                    {"fit": name, "name": key, "published": printed[key], "value": value, "error": error, "set": kind}
                )
    return found
