"""Runs lm-eval tasks with :class:`HeraldLM` and reports scores with everything that they depend on."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_exec.evaluation.suites import Suite, require_consent, version_problems
from herald_pipeline.errors import ConfigError, RunError, unknown_name

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from herald_exec.evaluation.harness_model import HeraldLM


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run: a pinned suite, or tasks by name from folders of task files.

    ``num_fewshot`` of ``None`` leaves each task its own.
    """

    tasks: tuple[str, ...]
    folders: tuple[Path, ...]
    num_fewshot: int | None = None
    suite: Suite | None = None


def require_harness() -> None:
    """Refuse with the remedy when lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        message = "lm-eval is not installed; install it with: pip install 'herald[harness]'"
        raise ConfigError(message) from None


def suite_selection(suite: Suite) -> Selection:
    """Tasks of a pinned suite, from lm-eval's own task files; only its folders are scanned (all take a minute)."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    return Selection((suite.task,), tuple(root / folder for folder in suite.folders), suite.num_fewshot, suite)


def _manager(selection: Selection) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    missing = [folder for folder in selection.folders if not folder.is_dir()]
    if missing:
        message = f"no folder of task files at {', '.join(map(str, missing))}"
        raise ConfigError(message)
    manager = TaskManager(include_defaults=False, include_path=list(selection.folders))
    for name in selection.tasks:
        if name not in manager.task_index:
            raise unknown_name("task", name, manager.task_index)
    return manager


def _config(manager: "TaskManager", name: str) -> Mapping[str, Any]:
    entry = manager.task_index.get(name)
    return {} if entry is None or entry.cfg is None else entry.cfg


def _task_version(manager: "TaskManager", name: str) -> float | None:
    found = (_config(manager, name).get("metadata") or {}).get("version")
    return None if found is None else float(found)


def check_versions(selection: Selection, manager: "TaskManager | None" = None) -> list[str]:
    """Where the installed lm-eval differs from the pinned suite."""
    if selection.suite is None:
        return []
    manager = manager or _manager(selection)
    found = {name: _task_version(manager, name) for name in selection.suite.versions}
    return version_problems(selection.suite, found)


def _code_tasks(selection: Selection, manager: "TaskManager") -> list[str]:
    suite = selection.suite
    if suite is not None and suite.runs_code:
        return [suite.task]
    return [name for name in selection.tasks if _config(manager, name).get("unsafe_code")]


@contextmanager
def _code_execution(allowed: bool) -> Iterator[None]:
    """The metric itself asks for this variable; it is set for the run and for no longer."""
    name = "HF_ALLOW_CODE_EVAL"
    before = os.environ.get(name)
    if allowed:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def run_harness(
    lm: "HeraldLM",
    selection: Selection,
    *,
    limit: int | None = None,
    chat: bool = False,
    allow_code_execution: bool = False,
    allow_other_versions: bool = False,
    samples: bool = False,
) -> dict[str, Any]:
    """Evaluate; JSON-ready scores, sample counts, versions, settings and what decoding took.

    Raises
    ------
    ConfigError
        Unknown tasks, versions other than the pinned ones, or code execution without consent.
    RunError
        lm-eval failed: a data set cannot be reached, or a metric's package is missing.
    """
    from lm_eval import simple_evaluate

    manager = _manager(selection)
    differing = check_versions(selection, manager)
    if differing and not allow_other_versions:
        raise ConfigError([*differing, "pass --allow-other-versions to run them all the same; the output will say so"])
    require_consent(_code_tasks(selection, manager), allowed=allow_code_execution)
    with _code_execution(allow_code_execution), _own_error():
        results = simple_evaluate(
            model=lm,
            tasks=list(selection.tasks),
            num_fewshot=selection.num_fewshot,
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=samples,
            confirm_run_unsafe_code=allow_code_execution,
        )
    deviations = [*differing, *setting_deviations(lm, selection.suite)]
    return _report(lm, selection, results, deviations, limit=limit, chat=chat)


@contextmanager
def _own_error() -> Iterator[None]:
    """Turn what lm-eval or a data set library raises into one message; our own errors pass."""
    from herald_pipeline.errors import HeraldError

    try:
        yield
    except HeraldError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        message = f"lm-eval stopped: {type(error).__name__}: {first}"
        raise RunError(message) from error


def setting_deviations(lm: "HeraldLM", suite: Suite | None) -> list[str]:
    """Where the model is asked in another way than the suite says: answer length, threshold, truncation."""
    if suite is None:
        return []
    threshold = getattr(lm.settings.policy.rule, "threshold", None)
    pairs = {
        "max_new_tokens": (lm.settings.max_new_tokens, suite.max_new_tokens),
        "threshold": (threshold, suite.threshold),
        "middle_truncation": (lm.middle_truncation, suite.middle_truncation),
    }
    return [f"{name} is {used}, pinned is {wanted}" for name, (used, wanted) in pairs.items() if used != wanted]


def _scores(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """``{task: {"metric,filter": value}}``, without the error bars that were not asked for."""
    return {
        task: {
            key: value
            for key, value in metrics.items()
            if "," in key and "_stderr" not in key and isinstance(value, int | float)
        }
        for task, metrics in results["results"].items()
    }


def _report(
    lm: "HeraldLM",
    selection: Selection,
    results: Mapping[str, Any],
    deviations: Sequence[str],
    *,
    limit: int | None,
    chat: bool,
) -> dict[str, Any]:
    suite = selection.suite
    report = {
        "model": lm.model.shape.name,
        "scores": _scores(results),
        "documents": {task: counts["effective"] for task, counts in results.get("n-samples", {}).items()},
        "limit": limit,
        "settings": {
            "num_fewshot": dict(results.get("n-shot", {})),
            **lm.settings.as_dict(),
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "chat_template": chat,
            "max_prompt_tokens": lm.max_prompt_tokens,
            "middle_truncation": lm.middle_truncation,
        },
        "versions": {
            "tasks": {task: value for task, value in results.get("versions", {}).items() if value != "N/A"},
            **{package: version(package) for package in ("lm_eval", "torch", "tokenizers")},
        },
        "pinned": suite is not None and not deviations,
        "deviations": list(deviations),
        "source": None if suite is None else suite.source,
        "decoding": lm.counts.as_dict(),
    }
    if "samples" in results:
        report["samples"] = _samples(results["samples"])
    return report


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """What each document was answered, before and after the task's filters."""
    return {
        task: [
            {
                "document": entry["doc_id"],
                "filter": entry.get("filter"),
                "answer": entry["resps"][0][0],
                "filtered": entry["filtered_resps"][0],
                "target": entry["target"],
            }
            for entry in entries
        ]
        for task, entries in samples.items()
    }
