"""The pages a reader starts from: their links lead somewhere, the files they name exist, their commands parse."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED_FOLDERS = (
    "benchmarks/",
    "calibration/",
    "docs/",
    "herald_exec/",
    "herald_pipeline/",
    "herald_sim/",
    "hw_profiles/",
)
APPS = {
    "herald-sim": "herald_sim.cli:app",
    "herald-exec": "herald_exec.cli:app",
    "calibration": "calibration.cli:app",
    "reports": "reports.cli:app",
    "herald_exec.evaluation": "herald_exec.evaluation.__main__:app",
}
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED_FILE = re.compile(r"`([\w./-]+\.(?:py|md|toml|json|csv|sh|c|gz))`")


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text(encoding="utf-8")))
    return {title.replace(" ", "-") for title in kept}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                yield page, target


def commands() -> Iterator[tuple[str, str]]:
    """Indented lines of the pages that call this project, with the backslash's continuation."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        variables = dict(re.findall(r'^ {4}(\w+)="([^"]*)"', text, re.MULTILINE))
        for line in re.findall(r"^ {4}(.+)$", text, re.MULTILINE):
            for name, value in variables.items():
                line = line.replace(f"${name} ", f"{value} ")
            if re.match(r"(herald-sim|herald-exec|python -m (calibration|reports|benchmarks|herald_exec))", line):
                yield page.name, line


@pytest.mark.parametrize(("page", "target"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1]}") for pair in links()])
def test_a_link_leads_to_a_file_and_a_heading_that_exist(page, target):
    path, _, anchor = target.partition("#")
    found = (page.parent / path).resolve() if path else page
    assert found.exists()
    if anchor:
        assert anchor in anchors(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_a_page_names_by_its_path_exists(page):
    named = NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    missing = [name for name in named if name.startswith(NAMED_FOLDERS) and not (ROOT / name).exists()]
    assert missing == []


def test_every_page_of_the_documentation_is_linked_from_the_readme():
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= linked


@pytest.mark.parametrize(("page", "line"), [pytest.param(*pair, id=" ".join(pair)[:90]) for pair in commands()])
def test_a_command_on_a_page_names_options_that_exist(page, line, help_of):
    words = shlex.split(line, comments=True)
    options = {word.split("=")[0] for word in words if word.startswith("--")}
    assert options <= help_of(words), f"{page}: {line}"


@pytest.fixture(scope="module")
def help_of() -> Callable[[list[str]], set[str]]:
    """Options of the subcommand that a command line calls."""

    @lru_cache
    def options(program: str, sub: str) -> set[str]:
        if program in APPS:
            module, _, name = APPS[program].partition(":")
            command = typer.main.get_command(getattr(import_module(module), name))
            command = getattr(command, "commands", {sub: command})[sub]
            return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        called = [sys.executable, "-m", program, "--help"]
        shown = subprocess.run(called, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return set(re.findall(r"--[a-z-]+", shown))

    def of(words: list[str]) -> set[str]:
        program, rest = (words[2], words[3:]) if words[0] == "python" else (words[0], words[1:])
        return options(program, rest[0] if rest else "") | {"--help"}

    return of
