"""What ships: tracked files stay small, the wheel holds what runs and nothing else."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from herald_sim.compiling import MODULES

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_tracked_files_stay_under_50_mib() -> None:
    files = [ROOT / name for name in git("ls-files", "-z").split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 50 * MIB


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of what git tracks, unpacked; its kernels, which nothing here calls, unoptimised."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    command += ["-Ccmake.build-type=None", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=500)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def files(wheel: Path) -> list[str]:
    return [path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()]


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_packages_profiles_published_numbers_and_the_extensions(wheel: Path) -> None:
    names = files(wheel)
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name and "__mypyc" not in name}
    assert tops == {"herald_pipeline", "herald_sim", "herald_exec"}
    assert "herald_pipeline/published/herald_published.csv" in names
    assert "herald_pipeline/hw_profiles/h100-sxm-80g_xeon-8481c.toml" in names
    built = {name.split(".")[0] for name in names if name.endswith(".so") and "__mypyc" not in name}
    loop = {str(Path(module).with_suffix("")) for module in MODULES}
    assert built == {"herald_exec/kernels/_core"} | loop


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_no_sources_of_the_extensions(wheel: Path) -> None:
    assert [name for name in files(wheel) if name.endswith((".pyx", ".c", ".h", "CMakeLists.txt"))] == []


RUNS = """
import sys
sys.path[:0] = [{first!r}]
sys.path += [{site!r}]
import json
import herald_sim.runner
from herald_pipeline import catalogue, hardware_io, methods
from herald_pipeline.pipeline import build
from herald_pipeline.steps import FixedSteps, parse
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate

profile = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
results = []
for method in methods.names():
    for steps in (FixedSteps(1, 32), FixedSteps(7, 32), parse("uniform:2,9", 32, 3)):
        for policy in ("lockstep", "first-done-first-out"):
            workload = Workload.uniform(4096, 4, gen_tokens=128, steps=steps, policy=policy)
            result = simulate(build(catalogue.get("llada2-mini"), method), profile, workload)
            results.append(result.to_dict())
print(json.dumps([herald_sim.runner.__file__.endswith(".py"), results], sort_keys=True))
"""


def runs(first: Path) -> tuple[bool, str]:
    """Whether the event loop under ``first`` is plain Python, and what its runs came to."""
    # -S: the checkout's editable install must not come first.
    script = RUNS.format(first=str(first), site=sysconfig.get_paths()["purelib"])
    done = subprocess.run([sys.executable, "-S", "-c", script], check=True, capture_output=True, text=True, cwd=first)
    plain, results = json.loads(done.stdout)
    return plain, json.dumps(results)


@pytest.mark.xdist_group("wheel")
def test_the_compiled_event_loop_says_what_the_interpreted_one_says(wheel: Path, tmp_path: Path) -> None:
    for package in ("herald_pipeline", "herald_sim"):
        shutil.copytree(wheel / package, tmp_path / package, ignore=shutil.ignore_patterns("*.so"))
    compiled, interpreted = runs(wheel), runs(tmp_path)
    assert (compiled[0], interpreted[0]) == (False, True)
    assert compiled[1] == interpreted[1]
