"""Real runs of points on this machine, in turn and several times, and the table that they leave.

One line is one run: the point, what came of it, the time of the reference beside it. People who bring logs write the
same table (``--measured``).
"""

import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from calibration.bench import divide_cores, pinned
from calibration.points import Point, from_row
from calibration.reference import reference_seconds
from herald_exec.execution import Options, Run, decode
from herald_exec.models import BlockModel, random_model
from herald_exec.policy import PlannedPolicy
from herald_exec.requests import DecodeRequest
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems, read_failure
from herald_pipeline.model import ModelShape
from herald_pipeline.result import Result
from herald_pipeline.steps import FixedSteps
from herald_pipeline.trace import Trace, write_chrome
from herald_pipeline.units import NS_PER_S

REQUIRED = ("method", "context", "batch", "throughput_tok_s")
FIGURES = ("throughput_tok_s", "block_time_s", "main_time_s", "retrieval_time_s", "stall_s", "exposed_transfer_s")
_POINT = ("method", "context", "batch", "steps", "blocks", "block_length", "kv_dtype", "budget", "set")
_OTHER = ("model", "hardware", "reference_s", "unsteady", "round")
STAGE = "stage."
"""Prefix of the columns with a stage's time per launch (own runs: the median), in seconds."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one point. A figure that could not be derived (no time passed) is absent, never 0 or infinite.

    Attributes
    ----------
    stages
        Median time of a launch, in seconds, by stage kind: a rate's prediction is of a launch that nothing disturbs.
    reference_s
        Mean time of the reference before and after the run.
    unsteady
        How much the slower of those two is above the faster: 0.3 is 30%. Of runs that state their pool's read rate
        before and after, the same of these.
    shares
        Share of all busy time, by stage kind.
    tails
        Mean over median of the launches' times: far above 1 where a few of many wait.
    dram_gb_s
        Read rate of the memory of the run's pool, the mean of right before and right after, with the run's threads.
    peak_tflop_s
        Rate of the kernels' widest arithmetic alone, the mean of the same two times.
    many_queries_gb_s
        What the work of many queries allows (:func:`herald_exec.kernels.many_queries_gb_s`), of runs that select with
        many, the mean of the same two times.
    unsteady_arithmetic
        How much the faster of the two times is above the slower, of many queries where they are known, else of the
        widest arithmetic.
    """

    point: Point
    figures: dict[str, float]
    stages: dict[str, float] = field(default_factory=dict)
    reference_s: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    unsteady: float | None = None
    tails: dict[str, float] = field(default_factory=dict)
    dram_gb_s: float | None = None
    peak_tflop_s: float | None = None
    many_queries_gb_s: float | None = None
    unsteady_arithmetic: float | None = None


def run_point(point: Point, model: BlockModel, *, keep_trace: bool = False, threads: int | None = None) -> Run:
    """Decode the point for real: synthetic KV, fixed steps, on the cores that the profile was measured on."""
    device = model.device
    main, retrieval = divide_cores(device, threads)
    options = Options(
        batch=point.batch,
        keep_trace=keep_trace,
        threads=max(1, len(retrieval)),
        pin_cores=device.type == "cpu",
        synthetic_kv=True,
        ignore_eos=True,
    )
    prompt = (0,) * point.context
    requests = [DecodeRequest(i, prompt, point.blocks * point.block_length) for i in range(point.batch)]
    plan = FixedSteps(point.steps, point.block_length)
    policy = PlannedPolicy(plan, Sampler(mask_token_id=model.shape.mask_token_id))
    pipeline = point.pipeline(model.shape)
    # A pass in line with the steps has the cores that play the GPU, as they have.
    in_line = {stage.stream for stage in pipeline.template.in_line()}
    alone = "retrieval" not in {stream.name for stream in pipeline.template.streams} - in_line
    with pinned(main if alone else ()):
        return decode(pipeline, model, requests, policy=policy, options=options)


def sample_of(
    point: Point, result: Result, trace: Trace | None = None, references: tuple[float, float] | None = None
) -> Sample:
    """Figures of a result, measured or simulated; without a trace a stage's time is its mean."""
    figures = {name: getattr(result, name) for name in FIGURES}
    means = {name: sums["busy_s"] / sums["count"] for name, sums in result.stages.items() if sums["count"]}
    medians = launch_medians(trace) if trace is not None else {}
    stages = {name: medians.get(name, mean) for name, mean in means.items()}
    total = sum(sums["busy_s"] for sums in result.stages.values())
    shares = {name: sums["busy_s"] / total for name, sums in result.stages.items()} if total else {}
    tails = {name: means[name] / stages[name] for name in medians if name in means and stages[name]}
    known = {name: value for name, value in figures.items() if value is not None}
    reference = None if references is None else sum(references) / 2
    unsteady = None if references is None else max(references) / min(references) - 1
    return Sample(point, known, stages, reference, shares, unsteady, tails)


def launch_medians(trace: Trace) -> dict[str, float]:
    """Median duration of a stage's launches in seconds, the first block left out."""
    found: dict[str, list[int]] = {}
    for span in trace.spans:
        if span.block > 0:
            found.setdefault(span.stage, []).append(span.end_ns - span.start_ns)
    return {name: statistics.median(durations) / NS_PER_S for name, durations in found.items()}


def measure_points(
    points: Sequence[Point],
    shape: ModelShape,
    *,
    device: str = "cpu",
    rounds: int = 3,
    threads: int | None = None,
    traces: Path | None = None,
    say: Say = lambda line: print(line, file=sys.stderr),
) -> list[Sample]:
    """Run every point once a round, so that a slow minute hits all of them; the first run of a process is thrown away.

    ``traces`` is a folder for the Chrome trace of the last round of each point.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = random_model(shape, device=device, dtype=dtype)
    main, _ = divide_cores(torch.device(device), threads)
    run_point(points[0], model, threads=threads)
    samples: list[Sample] = []
    after = reference_seconds(device, main)
    for number in range(rounds):
        for point in points:
            keep = traces is not None and number == rounds - 1
            # The time between two runs belongs to both.
            before = after
            run = run_point(point, model, keep_trace=True, threads=threads)
            after = reference_seconds(device, main)
            samples.append(sample_of(point, run.result, run.trace, (before, after)))
            if keep and run.trace is not None and traces is not None:
                run.trace.facts = {**run.trace.facts, "context": point.context}
                traces.mkdir(parents=True, exist_ok=True)
                write_chrome(run.trace, traces / f"{file_name(point)}.measured.trace.json.gz")
        say(f"  round {number + 1} of {rounds}: {len(points)} points run")
    return samples


def file_name(point: Point) -> str:
    """Stem of the files of a point."""
    return f"{point.method}_{point.context}x{point.batch}"


# Tables --------------------------------------------------------------------------------------------------------------


def row_of_sample(sample: Sample, **extra: Any) -> dict[str, Any]:
    """A run as a line of the table."""
    point = {name: getattr(sample.point, name) for name in _POINT}
    stages = {f"{STAGE}{name}": f"{seconds:.6g}" for name, seconds in sample.stages.items()}
    figures = {name: f"{value:.6g}" for name, value in sample.figures.items()}
    reference = {
        name: f"{value:.6g}"
        for name, value in (("reference_s", sample.reference_s), ("unsteady", sample.unsteady))
        if value is not None
    }
    return {**extra, **{k: "" if v is None else v for k, v in point.items()}, **figures, **reference, **stages}


def read_samples(
    path: Path, say: Say = lambda line: print(line, file=sys.stderr), assumed: Mapping[str, str] | None = None
) -> list[Sample]:
    """Runs of a table.

    Parameters
    ----------
    path
        Comma-separated file with a header; a line a run.
    say
        Gets a line about columns that are not used, or whose values are assumed.
    assumed
        What the cells hold that the table leaves out (``steps``, ``kv_dtype``, ..); without, own runs' defaults.

    Raises
    ------
    ConfigError
        A missing or misspelled column, a cell that is no number; all problems at once, each with its line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read runs from {path}: {read_failure(error)}") from None
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    _check_header(path, header, say)
    assumed = assumed or {}
    absent = [f"{name} {value}" for name, value in assumed.items() if name not in header]
    if absent:
        say(f"{path} does not say how its runs were made: {', '.join(absent)} assumed; add columns where it differs")
    problems: list[str | None] = []
    samples: list[Sample] = []
    for row in reader:
        whole = row | {name: value for name, value in assumed.items() if not row.get(name)}
        samples += _sample(whole, f"{path}, line {reader.line_num}", problems)
    if not samples and not problems:
        problems.append(f"{path}: no runs under the header; one line is one run")
    raise_problems(problems)
    return samples


def _check_header(path: Path, header: Sequence[str], say: Say) -> None:
    known = (*_POINT, *FIGURES, *_OTHER)
    problems = [
        f"{path}: column {name!r} is missing; a table of runs has {', '.join(REQUIRED)}"
        for name in REQUIRED
        if name not in header
    ]
    ignored = []
    for name in header:
        if name in known or name.startswith(STAGE):
            continue
        hint = did_you_mean(name, known)
        if "did you mean" in hint:
            problems.append(f"{path}: unknown column {name!r}{hint}")
        else:
            ignored.append(name)
    raise_problems(problems)
    if ignored:
        say(f"{path}: columns not used: {', '.join(ignored)}")


def _sample(row: dict[str, Any], where: str, problems: list[str | None]) -> Iterator[Sample]:
    before = len(problems)
    for name in ("context", "batch", "steps", "blocks", "block_length", "budget"):
        if row.get(name):
            _number(row[name], f"{where}: {name}", problems)
    figures = {name: _number(row.get(name), f"{where}: {name}", problems) for name in FIGURES}
    stages = {
        name.removeprefix(STAGE): _number(value, f"{where}: {name}", problems)
        for name, value in row.items()
        if name is not None and name.startswith(STAGE)
    }
    reference = _number(row.get("reference_s"), f"{where}: reference_s", problems)
    unsteady = _number(row.get("unsteady"), f"{where}: unsteady", problems)
    if len(problems) > before:
        return
    try:
        point = from_row(row)
    except (ConfigError, ValueError) as problem:
        problems.append(f"{where}: {problem}")
        return
    # A time or rate of 0 is one that could not be derived: the run had no makespan.
    yield Sample(
        point,
        {name: value for name, value in figures.items() if value},
        {name: value for name, value in stages.items() if value},
        reference or None,
        unsteady=unsteady,
    )


def _number(text: object, where: str, problems: list[str | None]) -> float | None:
    if text in (None, ""):
        return None
    try:
        value = float(str(text))
    except ValueError:
        problems.append(f"{where} must be a number, got {text!r}")
        return None
    problem = check_number(value, where, minimum=0)
    problems.append(problem) if problem else None
    return value
