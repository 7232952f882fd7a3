"""Compiles the simulator's event loop: a step of the build, never imported.

    python herald_sim/compiling.py --source . --out build/compiled

The modules named in :data:`MODULES` are where event mode spends its time. They are ordinary typed Python and run as
such from a checkout; in a wheel mypyc makes machine code of the very same files, which about halves the time of a
simulated block. What is compiled checks its argument types at run time, so a test compares both on the same runs.
Left out: ``clock.py``, whose classes are simpy's, and what fast mode calls with arrays (``cost.py``, ``stages.py``).
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

MODULES = (
    "herald_pipeline/scheduling/launches.py",
    "herald_pipeline/scheduling/program.py",
    "herald_pipeline/scheduling/rows.py",
    "herald_pipeline/scheduling/wiring.py",
    "herald_sim/beside_fetches.py",
    "herald_sim/pricing.py",
    "herald_sim/resources.py",
    "herald_sim/runner.py",
)
PACKAGES = ("herald_pipeline", "herald_sim")


def compile_modules(source: Path, out: Path) -> None:
    """Write the extension modules of ``source`` under ``out``, each in its package's folder."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    work = out / "build"
    for package in PACKAGES:
        shutil.rmtree(work / package, ignore_errors=True)
        shutil.copytree(source / package, work / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    out = out.resolve()
    os.chdir(work)  # mypyc names modules by their paths from here
    # An empty configuration: the checkout's own asks for more than compiling needs, and simpy may not be installed yet.
    options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir=cache"]
    modules = mypycify([*options, *MODULES], opt_level="3", target_dir="c")
    build = build_ext(Distribution({"name": "herald-simulator", "ext_modules": modules}))
    build.build_lib, build.build_temp = str(out), "objects"
    build.ensure_finalized()
    build.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    sys.path.pop(0)  # this folder's modules are not top-level ones
    compile_modules(chosen.source.resolve(), chosen.out)
