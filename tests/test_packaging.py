"""What ships: tracked files stay small, the wheel holds what runs and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_tracked_files_stay_under_50_mib() -> None:
    files = [ROOT / name for name in git("ls-files", "-z").split("\0") if name]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 50 * MIB


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of what git tracks."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_packages_profiles_published_numbers_and_one_extension(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info" not in name}
    assert tops == {"herald_pipeline", "herald_sim", "herald_exec"}
    assert "herald_pipeline/published/herald_published.csv" in wheel
    assert "herald_pipeline/hw_profiles/h100-sxm-80g_xeon-8481c.toml" in wheel
    assert len([name for name in wheel if name.endswith(".so")]) == 1


@pytest.mark.xdist_group("wheel")
def test_the_wheel_holds_no_sources_of_the_extension(wheel: list[str]) -> None:
    assert [name for name in wheel if name.endswith((".pyx", ".c", ".h", "CMakeLists.txt"))] == []
