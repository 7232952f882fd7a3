"""Task settings as the papers ran them, pinned by lm-eval's task versions.

DSB: GSM8K, MATH, HumanEval, MBPP, BBH with the harness, answers of 256 tokens, threshold 0.9 (article, section 6).
HERALD: four LongBench tasks, middle truncation, answers of at most 512 tokens, threshold 0.95 (section VI-A).
Prompts and metrics are lm-eval's own; what is pinned here is which of them, and how the model is asked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from herald_pipeline.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class Suite:
    """One benchmark as a paper ran it.

    Attributes
    ----------
    task
        Name of lm-eval's task or group.
    folders
        Folders of lm-eval's tasks that define it; only those are scanned.
    versions
        Version of every task that has been checked against the paper's setting, by name.
    num_fewshot
        Worked examples in the prompt.
    max_new_tokens
        Length of the answer.
    threshold
        Confidence threshold.
    runs_code
        Whether scoring executes what the model wrote.
    middle_truncation
        Whether a prompt that is too long loses its middle (LongBench) instead of being refused.
    source
        Where the setting is from.
    """

    task: str
    folders: tuple[str, ...]
    versions: Mapping[str, float]
    num_fewshot: int
    max_new_tokens: int
    threshold: float
    source: str
    runs_code: bool = False
    middle_truncation: bool = False


_MATH = ("algebra", "counting_and_prob", "geometry", "intermediate_algebra", "num_theory", "prealgebra", "precalc")


def _dsb(
    task: str, folders: tuple[str, ...], versions: Mapping[str, float], num_fewshot: int, *, runs_code: bool = False
) -> Suite:
    return Suite(
        task=task,
        folders=folders,
        versions=versions,
        num_fewshot=num_fewshot,
        max_new_tokens=256,
        threshold=0.9,
        source="DSB article, section 6",
        runs_code=runs_code,
    )


def _longbench(task: str, version: float) -> Suite:
    return Suite(
        task=f"longbench_{task}",
        folders=("longbench",),
        versions={f"longbench_{task}": version},
        num_fewshot=0,
        max_new_tokens=512,
        threshold=0.95,
        source="HERALD, section VI-A and Table I",
        middle_truncation=True,
    )


SUITES: dict[str, Suite] = {
    "gsm8k": _dsb("gsm8k", ("gsm8k",), {"gsm8k": 3.0}, 5),
    "math": _dsb(
        "minerva_math",
        ("minerva_math", "benchmarks"),
        {"minerva_math": 1.0, **{f"minerva_math_{part}": 3.1 for part in _MATH}},
        4,
    ),
    "humaneval": _dsb("humaneval", ("humaneval",), {"humaneval": 1.0}, 0, runs_code=True),
    "mbpp": _dsb("mbpp", ("mbpp",), {"mbpp": 1.0}, 3, runs_code=True),
    "bbh": _dsb(
        "bbh_cot_fewshot",
        ("bbh/cot_fewshot",),
        {"bbh_cot_fewshot": 3.0, "bbh_cot_fewshot_navigate": 4.0},
        3,
    ),
    "2wikimqa": _longbench("2wikimqa", 5.0),
    "narrativeqa": _longbench("narrativeqa", 5.0),
    "qmsum": _longbench("qmsum", 5.0),
    "repobench-p": _longbench("repobench-p", 6.0),
}
"""By the papers' names."""


def get_suite(name: str) -> Suite:
    """Suite by name; :class:`ConfigError` with the closest name otherwise."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]


def version_problems(suite: Suite, found: Mapping[str, float | None]) -> list[str]:
    """Where the installed lm-eval's tasks are of other versions than the pinned ones; ``found`` by task name."""
    return [
        f"task {name} has version {found.get(name)} in the installed lm-eval, pinned is {version}"
        for name, version in suite.versions.items()
        if found.get(name) != version
    ]


def require_consent(names: Iterable[str], *, allowed: bool) -> None:
    """Refuse to run the model's code unless it was allowed explicitly."""
    listed = sorted(names)
    if listed and not allowed:
        message = (
            f"{', '.join(listed)}: scoring executes code that the model writes, on this machine and as this user; "
            "pass --allow-code-execution if that is what you want (a container is advised)"
        )
        raise ConfigError(message)
