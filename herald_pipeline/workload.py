"""A workload: requests, batch, and how many denoising steps each block takes.

What a request can write at most (:mod:`herald_pipeline.scheduling.lengths`) decides whether it is admitted, in the
simulator, the executor and capacity alike.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems, read_failure, unknown_name
from herald_pipeline.scheduling.admission import Request
from herald_pipeline.scheduling.lengths import blocks_needed, check_length
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.steps import FixedSteps, Steps
from herald_pipeline.units import NS_PER_S

DEFAULT_STEPS = 20
DEFAULT_GEN_TOKENS = 512
MAX_BATCH = 1 << 20
"""More requests at once than any machine holds."""
MAX_TOKENS = 1 << 40
"""Longer than any request; keeps byte counts and clocks within what numbers hold exactly."""
_MAX_ARRIVAL_S = 1e9
_COLUMNS = {"id": False, "arrival_s": False, "prompt_tokens": True, "new_tokens": True}


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a user states it: prompt and answer lengths in tokens, arrival in nanoseconds."""

    id: int
    prompt_tokens: int
    new_tokens: int
    arrival_ns: int = 0

    def blocked(self, block_length: int) -> Request:
        """The request in whole blocks: S is the prompt's completed blocks, its tail belongs to the first block."""
        context = self.prompt_tokens // block_length * block_length
        blocks = blocks_needed(self.prompt_tokens, self.new_tokens, block_length)
        return Request(
            self.id,
            context,
            blocks,
            self.arrival_ns,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a pipeline.

    Attributes
    ----------
    requests
        All requests, in the order of their ids.
    batch
        Request slots: how many are decoded together at most.
    block_length
        B; the pipeline's settings hold the same number.
    steps
        Denoising steps of each block.
    policy
        When a row that has completed its block goes on.
    """

    requests: tuple[RequestSpec, ...]
    batch: int
    block_length: int = 32
    steps: Steps = field(default_factory=lambda: FixedSteps(DEFAULT_STEPS))
    policy: BatchPolicy = BatchPolicy.LOCKSTEP

    def __post_init__(self) -> None:
        problems = [
            check_number(self.batch, "batch", minimum=1, maximum=MAX_BATCH, integer=True),
            check_number(self.block_length, "block_length", minimum=1, integer=True),
        ]
        if not self.requests:
            problems.append("requests: the workload is empty; give --context and --batch, or --requests")
        problems += [problem for request in self.requests for problem in _request_problems(request)]
        ids = [request.id for request in self.requests]
        if len(set(ids)) != len(ids):
            problems.append("requests: ids must be unique")
        raise_problems(problems)

    @classmethod
    def uniform(
        cls,
        context: int | Sequence[int],
        batch: int,
        *,
        gen_tokens: int | None = None,
        block_length: int = 32,
        steps: Steps | int | None = None,
        policy: BatchPolicy | str = BatchPolicy.LOCKSTEP,
    ) -> Self:
        """``batch`` requests that all arrive at once; several contexts are dealt out in turn.

        ``gen_tokens`` is the answer's length (512), ``steps`` a plan or T (20, or B where blocks are shorter).
        """
        contexts = [context] if isinstance(context, int | float) else list(context)
        new_tokens = DEFAULT_GEN_TOKENS if gen_tokens is None else gen_tokens
        problems = [check_number(value, "context", minimum=0, maximum=MAX_TOKENS, integer=True) for value in contexts]
        problems += [
            check_number(batch, "batch", minimum=1, maximum=MAX_BATCH, integer=True),
            check_number(new_tokens, "gen_tokens", minimum=1, maximum=MAX_TOKENS, integer=True),
            check_number(block_length, "block_length", minimum=1, integer=True),
            None if contexts else "context: give at least one",
        ]
        raise_problems(problems)
        if steps is None:
            steps = min(DEFAULT_STEPS, block_length)
        plan = FixedSteps(steps, block_length) if isinstance(steps, int | float) else steps
        requests = tuple(RequestSpec(i, int(contexts[i % len(contexts)]), int(new_tokens)) for i in range(batch))
        return cls(requests, batch, block_length, plan, parse_policy(policy))

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        batch: int,
        *,
        block_length: int = 32,
        steps: Steps | None = None,
        policy: BatchPolicy | str = BatchPolicy.LOCKSTEP,
    ) -> Self:
        """Requests from a CSV with ``prompt_tokens`` and ``new_tokens``, optionally ``id`` and ``arrival_s``."""
        plan = steps or FixedSteps(min(DEFAULT_STEPS, block_length), block_length)
        return cls(read_requests(path), batch, block_length, plan, parse_policy(policy))

    def blocked(self) -> tuple[Request, ...]:
        """The requests in whole blocks, as the program takes them."""
        return tuple(request.blocked(self.block_length) for request in self.requests)

    @property
    def largest_request_tokens(self) -> int:
        """Positions that the longest request takes at most, blocks rounded up."""
        return max(request.padded_tokens(self.block_length) for request in self.blocked())

    def length_problems(self, limit: int) -> list[str]:
        """One problem for each request that does not fit ``limit`` positions."""
        found = [
            check_length(request.prompt_tokens, request.new_tokens, self.block_length, limit, f"request {request.id}")
            for request in self.requests
        ]
        return [problem for problem in found if problem]


def parse_policy(name: BatchPolicy | str) -> BatchPolicy:
    """Batch policy of that name; an unknown one is refused with the closest."""
    try:
        return BatchPolicy(name)
    except ValueError:
        raise unknown_name(
            kind="batch policy", name=str(name), valid=[policy.value for policy in BatchPolicy]
        ) from None


def _request_problems(request: RequestSpec) -> list[str | None]:
    where = f"request {request.id}"
    return [
        check_number(request.prompt_tokens, f"{where}: prompt_tokens", minimum=0, maximum=MAX_TOKENS, integer=True),
        check_number(request.new_tokens, f"{where}: new_tokens", minimum=1, maximum=MAX_TOKENS, integer=True),
        check_number(request.arrival_ns, f"{where}: arrival_ns", minimum=0, integer=True),
    ]


def read_requests(path: str | Path) -> tuple[RequestSpec, ...]:
    """Requests of a CSV file; every problem in one error, each with its line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read requests from {path}: {read_failure(error)}"
        raise ConfigError(message) from None
    reader = csv.DictReader(text.splitlines())
    header = [name.strip() for name in reader.fieldnames or ()]
    reader.fieldnames = header
    problems = [
        f"{path}: unknown column {name!r}{did_you_mean(name, _COLUMNS)}" for name in header if name not in _COLUMNS
    ]
    problems += [
        f"{path}: column {name!r} is missing" for name, needed in _COLUMNS.items() if needed and name not in header
    ]
    problems += [f"{path}: column {name!r} stands twice" for name in sorted({n for n in header if header.count(n) > 1})]
    raise_problems(problems)
    requests = []
    for index, row in enumerate(reader):
        where = f"{path}, line {reader.line_num}"
        if None in row:
            problems.append(f"{where} has {len(header) + len(row[None])} cells, the header {len(header)}")
        values = {name: _cell(row.get(name), f"{where}: {name}", problems) for name in header}
        requests.append(
            RequestSpec(
                int(values.get("id", index)),
                int(values.get("prompt_tokens", 0)),
                int(values.get("new_tokens", 1)),
                round(values.get("arrival_s", 0.0) * NS_PER_S),
            )
        )
    if not requests:
        problems.append(f"{path}: no requests; give one a line under the header {','.join(_COLUMNS)}")
    raise_problems(problems)
    return tuple(requests)


def _cell(text: str | None, where: str, problems: list[str]) -> float:
    """Number in a cell; 0 with a problem noted when there is none."""
    name = where.rpartition(" ")[2]
    try:
        value = float(text if text is not None else "")
    except ValueError:
        problems.append(f"{where} must be a number, got {text!r}")
        return 0.0
    minimum = {"new_tokens": 1.0}.get(name, 0.0)
    maximum = _MAX_ARRIVAL_S if name == "arrival_s" else float(MAX_TOKENS)
    problem = check_number(value, where, minimum=minimum, maximum=maximum, integer=name != "arrival_s")
    if problem:
        problems.append(problem)
        return 0.0
    return value
