"""The public entry: one pipeline with one model on one device -> :class:`~herald_pipeline.result.Result`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

# The modules that register actions.
from herald_exec import denoising, fetching, prefill, proxies, retrieval, shadow_actions, transfers  # noqa: F401
from herald_exec.footprint import beside_pools_bytes
from herald_exec.models.base import BlockModel
from herald_exec.op_times import OpTimes
from herald_exec.pacing import paced
from herald_exec.policy import PlannedPolicy, Policy
from herald_exec.pools import TORCH_DTYPES, Pools
from herald_exec.requests import DecodeRequest, RowState, request_problems
from herald_exec.runner import BeforeStage, Execution
from herald_exec.session import ACTIONS, Action, OnBlock, Session, bind
from herald_exec.shadow import Shadow
from herald_exec.streams import Streams, ThreadStreams, split_cores
from herald_pipeline import capacity, room, validate
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError, RunError, check_number, raise_problems
from herald_pipeline.model import Attention
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home, RequestSize
from herald_pipeline.result import Recorder, Result
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.steps import FixedSteps
from herald_pipeline.trace import Trace


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is carried out; none of it changes what is decoded.

    Attributes
    ----------
    batch
        Request slots.
    policy
        When a row that has completed its block goes on.
    kv_tokens
        KV room of admission, in tokens of all running requests together; ``None``: no limit.
    check
        Keep the position of every pool entry and check it at every read (INV: no position twice in a pool).
    keep_trace
        Keep one span a launch.
    threads
        Threads of the CPU kernels; ``None`` is all that the process may use.
    pin_cores
        Bind ``main`` and ``retrieval`` to different cores.
    synthetic_kv
        Fill prompts' KV with seeded random numbers instead of computing it.
    ignore_eos
        Go on behind an EOS: speed runs.
    link_limit_gb_s
        Hold copies back to this rate in each direction (:mod:`herald_exec.pacing`); ``None``: as fast as the link is.
    validated
        Refuse a pipeline with hazards or deadlocks; off only to show what a missing edge does.
    on_block
        Told of every completed block while the run goes on: streaming and stop words.
    op_times
        Collects torch operations by stage; slows the run down.
    """

    batch: int = 1
    policy: BatchPolicy = BatchPolicy.LOCKSTEP
    kv_tokens: int | None = None
    check: bool = False
    keep_trace: bool = False
    threads: int | None = None
    pin_cores: bool = False
    synthetic_kv: bool = False
    ignore_eos: bool = False
    link_limit_gb_s: float | None = None
    validated: bool = True
    seed: int = 0
    before_stage: BeforeStage | None = None
    on_block: OnBlock | None = None
    op_times: OpTimes | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a run.

    Attributes
    ----------
    answers
        Request id -> token ids of its answer, cut behind the first EOS.
    commits
        Request id -> block -> tokens accepted in each step; what ``--commits`` of the simulator reads.
    checksums
        Pool -> sum of its contents at the end (with ``check``).
    """

    result: Result
    answers: dict[int, list[int]]
    commits: dict[int, list[list[int]]]
    trace: Trace | None
    checksums: dict[str, float]


def decode(
    pipeline: Pipeline,
    model: BlockModel,
    requests: Sequence[DecodeRequest],
    *,
    policy: Policy | None = None,
    options: Options = Options(),
) -> Run:
    """Decode ``requests`` with the method that ``pipeline`` describes.

    Parameters
    ----------
    policy
        Which tokens are accepted when; default: the description's T, 20 steps a block, by confidence.

    Raises
    ------
    ConfigError
        Requests, model and pipeline do not fit together.
    CapacityError
        The pools cannot be allocated.
    RunError
        A stage failed or the run was interrupted; the message names stage, layer and block, the cause is chained,
        ``partial`` is the result so far, and every pool has been freed.
    """
    _check(pipeline, model, requests, timed_only=options.synthetic_kv and not options.check)
    if options.link_limit_gb_s is not None:
        rate, name = options.link_limit_gb_s, "link_limit_gb_s"
        # Below 1 MB/s a copy takes minutes: no bus is that slow, and a run would seem to hang.
        raise_problems([check_number(rate, name, above=0) or check_number(rate, name, minimum=1e-3)])
    if options.validated:
        validate.check_once(pipeline)
    bind(pipeline)
    block = pipeline.settings.block_length
    policy = policy or PlannedPolicy(
        FixedSteps(min(20, block), block), Sampler(mask_token_id=model.shape.mask_token_id)
    )
    recorder = Recorder("measured", keep_trace=options.keep_trace, policy=options.policy)
    blocked = [request.blocked(block) for request in requests]
    program = Program(pipeline, blocked, slots=options.batch, policy=options.policy, kv_tokens=options.kv_tokens)
    fitting = [
        r.padded_tokens(block)
        for r in blocked
        if options.kv_tokens is None or r.padded_tokens(block) <= options.kv_tokens
    ]
    size = capacity.request_size(pipeline, max(fitting, default=block))
    session = _session(pipeline, model, size, policy, options)
    streams: Streams | None = None
    checksums: dict[str, float] = {}
    facts = _facts(pipeline, session.pools, size, options)
    try:
        ops = nullcontext() if options.op_times is None else options.op_times.recording()
        with _own_error(recorder, program, pipeline, options), torch.inference_mode(), ops:
            streams, actions = _device(pipeline, session, options)
            if options.op_times is not None:
                actions = options.op_times.marked({**ACTIONS, **(actions or {})})
            if options.link_limit_gb_s is not None:
                actions = paced(pipeline, actions, options.link_limit_gb_s)
            Execution(
                program,
                session,
                {request.id: request for request in requests},
                streams,
                recorder,
                before_stage=options.before_stage,
                actions=actions,
            ).run()
            streams.close()
            checksums = session.pools.checksums() if options.check else {}
    finally:
        if streams is not None:
            streams.close()
        session.pools.close()
    on_device = {"pinned": True, "device_path": session.path} if session.device.type == "cuda" else {}
    beside = beside_pools_bytes(
        pipeline,
        size.tokens,
        options.batch,
        weight_bytes=model.weights.nbytes(),
        on_gpu=session.device.type == "cuda",
        fused=session.path == "fused",
    )
    held = _held(pipeline, facts, program.admission.fullest, size, options.batch)
    facts, held = (_with_beside(found, beside) for found in (facts, held))
    result = _result(recorder, program, pipeline, options, {**facts, **held}, **on_device, **_reserved(facts, held))
    if recorder.trace is not None:
        named = {"model": pipeline.model.name, "method": pipeline.method.name, "device": str(session.device)}
        recorder.trace.facts = {**named, "pinned": result.extra["pinned"], "result": result.to_dict()}
    state = session.state
    return Run(result, state.answers, state.commits, recorder.trace, checksums)


def execute(
    pipeline: Pipeline,
    model: BlockModel,
    device: torch.device | str = "cpu",
    *,
    requests: Sequence[DecodeRequest],
    policy: Policy | None = None,
    options: Options = Options(),
) -> Result:
    """:func:`decode`, for those who want figures: the same :class:`Result` as the simulator's."""
    if torch.device(device).type != model.device.type:
        message = f"device is {torch.device(device)}, the model's weights are on {model.device}; load it there"
        raise ConfigError(message)
    return decode(pipeline, model, requests, policy=policy, options=options).result


def _session(pipeline: Pipeline, model: BlockModel, size: RequestSize, policy: Policy, options: Options) -> Session:
    settings = pipeline.settings
    queries = settings.window_length  # room for either kind of pass
    pools = Pools(pipeline, options.batch, size, model.device, queries=queries, check=options.check)
    if any(pool.name == "partial" for pool in pipeline.pools):
        pools.partial = proxies.PartialKeys(model, settings.proxy_fraction, options.batch, size.tokens)
    if any(pool.name == "shadow" for pool in pipeline.pools):
        pools.shadow = Shadow(model, settings, options.batch, size)
    state = RowState(options.batch, size.tokens, settings.block_length, model.device, settings.window_length)
    eos = () if options.ignore_eos else model.shape.eos_token_ids
    return Session(
        pipeline,
        model,
        pools,
        state,
        policy,
        eos,
        options.threads,
        options.synthetic_kv,
        options.seed,
        options.on_block,
        rows_together=options.policy.rows_together(options.batch),
    )


def _device(pipeline: Pipeline, session: Session, options: Options) -> tuple[Streams, Mapping[str, Action] | None]:
    """Streams of the model's device, and the actions that it carries out in its own way."""
    names = [stream.name for stream in pipeline.template.streams]
    # A pass in line with the steps has all cores, as they have; halves of a batch then share them.
    in_line = {stage.stream for stage in pipeline.template.in_line()}
    cores = split_cores([name for name in names if name not in in_line]) if options.pin_cores else None
    if session.device.type == "cuda":
        from herald_exec.cuda import open_device  # here, so that the CPU needs neither CUDA nor Triton

        return open_device(session, cores)
    return ThreadStreams(names, cores), None


def _check(pipeline: Pipeline, model: BlockModel, requests: Sequence[DecodeRequest], *, timed_only: bool) -> None:
    settings, problems = pipeline.settings, request_problems(requests, model.shape)
    problems.append(pipeline.method.execution_problem(timed_only=timed_only))
    if model.shape.attention is not Attention.BLOCK_CAUSAL:
        problems.append(
            f"{model.shape.name} is a bidirectional model: it has no completed prefix to keep; decode it with a cache"
        )
    if replace(pipeline.model, sources={}) != replace(model.shape, sources={}):
        problems.append(f"the pipeline describes {pipeline.model.name}, the model is {model.shape.name}")
    for name in ("kv_dtype", "dram_kv_dtype"):
        if getattr(settings, name) not in TORCH_DTYPES:
            problems.append(f"{name} {getattr(settings, name)} is simulated only; use one of {', '.join(TORCH_DTYPES)}")
    trained = model.shape.block_length
    if settings.window_blocks > 1 and trained % settings.block_length and settings.block_length % trained:
        problems.append(
            f"block_length {settings.block_length}, the window's stride, must divide {trained}, the block that "
            f"{model.shape.name} was trained with, or be a multiple of it"
        )
    device_dtype = TORCH_DTYPES.get(settings.kv_dtype)
    if device_dtype is not None and device_dtype is not model.kv_dtype:
        problems.append(
            f"kv_dtype is {settings.kv_dtype}, the model computes {model.kv_dtype}; "
            f"build the pipeline with kv_dtype='{_kv_name(model.kv_dtype)}'"
        )
    raise_problems(problems)


def _kv_name(dtype: torch.dtype) -> str:
    return next((str(name) for name, known in TORCH_DTYPES.items() if known is dtype), str(dtype))


@contextmanager
def _own_error(recorder: Recorder, program: Program, pipeline: Pipeline, options: Options) -> Iterator[None]:
    """Whatever ends the run early leaves as one :class:`RunError` with the partial result."""
    try:
        yield
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            error = RunError(f"interrupted after {recorder.forwards} forwards")
        elif isinstance(problem, RunError):
            error = problem
        else:
            error = RunError(f"the run ended: {type(problem).__name__}: {problem}")
        error.partial = replace(_result(recorder, program, pipeline, options), partial=True)  # type: ignore[attr-defined]
        if error is problem:
            raise
        raise error from problem


def _facts(pipeline: Pipeline, pools: Pools, size: RequestSize, options: Options) -> dict[str, Any]:
    """What the pools take of either memory, and whether the run leaves the model's positions (speed runs may; U12)."""
    return {
        "kv_bytes_per_request": pools.num_bytes / options.batch,
        "hbm_bytes": float(pools.bytes_in(Home.HBM)),
        "dram_bytes": float(pools.bytes_in(Home.DRAM)),
        "beyond_max_positions": size.tokens > pipeline.model.max_positions,
    }


def _held(
    pipeline: Pipeline, facts: Mapping[str, Any], fullest: Sequence[Sequence[int]], size: RequestSize, batch: int
) -> dict[str, Any]:
    """Bytes that the requests of the run's fullest moments held, each with its own length; empty: all that is there."""
    if not fullest or [size.tokens] * batch in [list(sizes) for sizes in fullest]:
        return {}
    homes = {"hbm_bytes": Home.HBM, "dram_bytes": Home.DRAM}
    return {
        name: min(facts[name], max(room.pool_bytes_held(pipeline, sizes, home) for sizes in fullest))
        for name, home in homes.items()
    }


def _with_beside(facts: Mapping[str, Any], beside_bytes: float) -> dict[str, Any]:
    """``facts`` with what stays on the device beside the pools, where they say what the pools take of it."""
    return {name: value + beside_bytes if name == "hbm_bytes" else value for name, value in facts.items()}


def _reserved(facts: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """What the pools have room for, every slot for the longest request, where the requests held less."""
    return {f"{name}_reserved": facts[name] for name in held}


def _result(
    recorder: Recorder,
    program: Program,
    pipeline: Pipeline,
    options: Options,
    facts: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Result:
    admission, method = program.admission, pipeline.method
    return recorder.result(
        batch=options.batch,
        budget=pipeline.settings.budget,
        finished=len(admission.finished),
        rejected=admission.rejected,
        prefilled=not options.synthetic_kv,
        assumptions=pipeline.assumptions,
        provenance={"measured": sorted(recorder.stages)},
        extra={"model": pipeline.model.name, "method": method.name, "pinned": False, **extra},
        **(facts or {}),
    )
