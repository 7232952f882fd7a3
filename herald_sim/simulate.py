"""The public entry: one pipeline on one profile under one workload -> :class:`~herald_pipeline.result.Result`."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from herald_pipeline import capacity, hardware_io, trace, validate
from herald_pipeline.capacity import Memory
from herald_pipeline.hardware import Profile
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Home
from herald_pipeline.result import FORWARD_STAGES, Recorder, Result
from herald_pipeline.room import admission_room, held
from herald_pipeline.scheduling.program import Program
from herald_pipeline.units import NS_PER_S
from herald_pipeline.workload import Workload
from herald_sim.checks import Ledger
from herald_sim.cost import CostModel, needs
from herald_sim.planning import other_memories
from herald_sim.runner import Simulation

_RESOURCES = {"gpu": "gpu", "cpu": "cpu selection", "h2d": "h2d link", "d2h": "d2h link"}


def simulate(
    pipeline: Pipeline,
    profile: Profile,
    workload: Workload,
    *,
    memory: Memory | None = None,
    check: bool = False,
    trace_out: Path | None = None,
    beyond_memory: bool = False,
    fast: bool = False,
) -> Result:
    """Event-driven prediction of a run.

    Parameters
    ----------
    memory
        Memory to stay within; default: all that the profile has.
    check
        Run the invariants (rates, clock, work, requests) and raise on the first that does not hold.
    trace_out
        Where to write the Chrome trace (``.gz`` compresses).
    beyond_memory
        Go on where it does not fit, as if memory had no end: the projected lines of figures.
    fast
        Leave contention out and evaluate all blocks at once (:mod:`herald_sim.fast`); the result's ``mode`` says so, or
        why events were used all the same, and ``contention_error`` what a few blocks of events differ by.

    Raises
    ------
    ProfileError
        The profile lacks a number that the run would read; raised before the first event.
    CapacityError
        What is asked for does not fit, or not one of the requests would be served; with the budget as a table.
    """
    required = needs(pipeline)
    if profile.missing(required):
        profile.check_complete(required, hardware_io.complete_names(required))
    memory = memory or Memory.of(profile)
    validate.check_once(pipeline)
    room = None
    if not beyond_memory:
        # The other profiles are read only to name those that would hold it.
        room = admission_room(
            pipeline, workload, memory, others=lambda: other_memories(profile, memory), formats=tuple(KVDtype)
        )
    mode = "events"
    if fast:
        from herald_sim.uncontended import why_not

        reason = why_not(pipeline, workload)
        if reason is None and trace_out is None and not check:
            return _fast_result(pipeline, profile, workload, memory)
        mode = f"events (fast mode: {reason or 'a trace or a check needs events'})"
    run = prepare(pipeline, profile, workload, room, traced=trace_out is not None, check=check)
    run.simulation.run()
    if run.ledger is not None:
        run.ledger.close(run.program.admission)
    result = conclude(run, pipeline, profile, workload, memory, mode)
    recorder = run.recorder
    if trace_out is not None and recorder.trace is not None:
        named = {"model": pipeline.model.name, "method": pipeline.method.name, "hardware": profile.name}
        recorder.trace.facts = {**named, "result": result.to_dict()}
        trace.write_chrome(recorder.trace, trace_out)
    return result


class Prepared(NamedTuple):
    """A simulation that has not begun, and what its result is made of."""

    simulation: Simulation
    program: Program
    recorder: Recorder
    costs: CostModel
    ledger: Ledger | None


def prepare(
    pipeline: Pipeline,
    profile: Profile,
    workload: Workload,
    room: int | None,
    *,
    traced: bool = False,
    check: bool = False,
    **shared: Any,
) -> Prepared:
    """A simulation ready to run; ``shared`` is what it has in common with others on the host."""
    recorder = Recorder("simulated", keep_trace=traced, policy=workload.policy)
    costs = CostModel(pipeline, profile)
    program = Program(pipeline, workload.blocked(), slots=workload.batch, policy=workload.policy, kv_tokens=room)
    ledger = Ledger(profile) if check else None
    tails = {request.id: request.prompt_tokens % workload.block_length for request in workload.requests}
    simulation = Simulation(
        program,
        costs,
        workload.steps,
        recorder,
        ledger=ledger,
        last_tokens=_last_tokens(workload),
        prompt_tails=tails,
        **shared,
    )
    return Prepared(simulation, program, recorder, costs, ledger)


def conclude(
    run: Prepared, pipeline: Pipeline, profile: Profile, workload: Workload, memory: Memory, mode: str
) -> Result:
    """The result of a simulation that has ended."""
    admission = run.program.admission
    result = run.recorder.result(
        batch=workload.batch,
        budget=pipeline.settings.budget,
        finished=len(admission.finished),
        rejected=admission.rejected,
        **facts(pipeline, profile, workload, memory, admission.fullest),
    )
    outside, prefill_outside = run.costs.extrapolated, run.costs.prefill_extrapolated
    if run.recorder.prefills_between_blocks:
        outside |= prefill_outside
    extra = {**result.extra, "mode": mode, **_outside(outside, prefill_outside)}
    return replace(result, extra=extra, **status(result, pipeline, workload, extrapolated=bool(outside)))


def _outside(blocks: Set[str], prefill: Set[str]) -> dict[str, list[str]]:
    """Curves that were left, as a result lists them: by prices that the throughput rests on, and by prefill's."""
    named = {"extrapolated": blocks, "prefill_extrapolated": prefill}
    return {name: sorted(curves) for name, curves in named.items() if curves}


_WAITS = 0.05
"""Share of a block from which on the main stream's waiting decides what limits."""
_FEW_BLOCKS = 6


def _fast_result(pipeline: Pipeline, profile: Profile, workload: Workload, memory: Memory) -> Result:
    """A run of few blocks by events, with the figures of all blocks put in and their difference stated."""
    from herald_sim import fast as fast_mode

    length = pipeline.settings.block_length
    few = [replace(r, new_tokens=min(r.new_tokens, _FEW_BLOCKS * length)) for r in workload.requests]
    short = replace(workload, requests=tuple(few))
    by_events = simulate(pipeline, profile, short, memory=memory, beyond_memory=True)
    both = fast_mode.evaluate(pipeline, profile, short)
    found = fast_mode.evaluate(pipeline, profile, workload)
    assert by_events.throughput_tok_s is not None
    error = both.throughput_tok_s / by_events.throughput_tok_s - 1
    blocks = workload.blocked()[0].blocks
    about = facts(pipeline, profile, workload, memory, [[workload.largest_request_tokens] * len(workload.requests)])
    # Few blocks read what depends on contention, too; all of them reach the longest context.
    outside = found.extrapolated.union(by_events.extra.get("extrapolated", ()))
    extra = {
        **about["extra"],
        "mode": "fast: contention left out",
        "contention_error": error,
        **_outside(outside, set(by_events.extra.get("prefill_extrapolated", ()))),
    }
    return replace(
        by_events,
        throughput_tok_s=found.throughput_tok_s,
        block_time_s=found.block_time_s,
        first_block_time_s=found.first_block_time_s,
        main_time_s=found.main_time_s,
        stall_s=found.stall_s,
        retrieval_time_s=None,
        exposed_transfer_s=None,
        end_to_end_tok_s=None,
        blocks=blocks,
        forwards=by_events.forwards // by_events.blocks * blocks,
        delivered_tokens=found.delivered_tokens,
        **{**about, "extra": extra},
        **status(by_events, pipeline, short, extrapolated=bool(outside)),
    )


def _last_tokens(workload: Workload) -> dict[int, int]:
    """Tokens of each request's last block that belong to its answer, where not all do."""
    found = {}
    length = workload.block_length
    for request in workload.requests:
        used = (request.prompt_tokens + request.new_tokens) % length
        if used:
            found[request.id] = used
    return found


def facts(
    pipeline: Pipeline, profile: Profile, workload: Workload, memory: Memory, fullest: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """What a result says beside its figures: memory, limits of the model, where numbers come from.

    Memory is what the run takes at its peak, each request with its own length; where slots that all hold the longest
    request would take more, that is stated as ``.._reserved`` beside it: an executor lays its pools out so.

    Parameters
    ----------
    fullest
        Padded tokens of the requests that ran together at the run's fullest moments; default: the longest one in every
        slot.
    """
    moments = fullest or [[workload.largest_request_tokens] * workload.batch]
    tokens = max(map(max, moments))
    budget = capacity.budget(pipeline, tokens, workload.batch, memory)
    taken = [held(pipeline, sizes, workload.batch, memory) for sizes in moments]
    hbm = max(each.total(Home.HBM, transient=False) for each in taken)
    dram = max(each.total(Home.DRAM) for each in taken)
    short = [each.shortage for each in taken if not each.fits]
    reserved = {
        "hbm_bytes_reserved": budget.total(Home.HBM, transient=False),
        "dram_bytes_reserved": budget.total(Home.DRAM),
    }
    unequal = (hbm, dram) != tuple(reserved.values())
    return {
        "kv_bytes_per_request": budget.kv_bytes_per_request,
        "hbm_bytes": hbm,
        "dram_bytes": dram,
        "beyond_max_positions": tokens > pipeline.model.max_positions,
        "assumptions": (*pipeline.assumptions, *_of_format(pipeline)),
        "provenance": provenance(profile),
        "extra": {
            "model": pipeline.model.name,
            "method": pipeline.method.name,
            "hardware": profile.name,
            "engine": profile.engine.name,
            **({"beyond_memory": short[0]} if short else {}),
            **(reserved if unequal else {}),
        },
    }


def provenance(profile: Profile) -> Mapping[str, Any]:
    """Where the profile's numbers come from: each provenance with its quantities, and this run's overrides.

    A quantity that stands in for a neighbour is ``repeated``, and counts for none of the others.
    """
    found: dict[str, list[str]] = {}
    for path, _, quantity in profile.quantities():
        if quantity is not None:
            kind = "repeated" if quantity.origin.same_as else str(quantity.origin.provenance)
            found.setdefault(kind, []).append(path)
    return {**{kind: sorted(paths) for kind, paths in sorted(found.items())}, "overrides": list(profile.overrides)}


_MEASURED_FORMATS = (KVDtype.BF16, KVDtype.FP16, KVDtype.FP32)
"""Formats of KV of 16 and 32 bits: what ``measure`` times reads such."""


def _of_format(pipeline: Pipeline) -> tuple[str, ...]:
    """What a format of KV that no kernel was measured with leaves open."""
    formats = (pipeline.settings.kv_dtype, pipeline.settings.dram_kv_dtype)
    unmeasured = sorted({str(kind) for kind in formats if kind not in _MEASURED_FORMATS})
    return tuple(
        f"KV in {kind}: kernels keep the profile's efficiencies; none that reads it was measured" for kind in unmeasured
    )


def status(result: Result, pipeline: Pipeline, workload: Workload, *, extrapolated: bool) -> dict[str, Any]:
    """Status and the resource that limits; ``extrapolated``: the throughput rests on prices outside what was measured.

    What limits is the one that is busy longest; but where the main stream waits and another resource is busy for half
    of the time or more, the waiting is for that one, and it limits although the GPU may have as much to do.
    """
    stages = {stage.name: stage for stage in pipeline.template.stages()}
    busy: dict[str, float] = {}
    for name, sums in result.stages.items():
        resource = _RESOURCES[stages[name].resource]
        busy[resource] = busy.get(resource, 0.0) + sums["busy_s"]
    if (result.stall_s or 0.0) > _WAITS * (result.block_time_s or 0.0):
        others = {name: time for name, time in busy.items() if name != "gpu" and time >= _waited_for_s(result)}
        busy = others or busy
    limit = max(sorted(busy), key=lambda resource: busy[resource]) if busy else None
    if extrapolated:
        return {"status": "EXTRAPOLATED", "limit": limit}
    served = limit is None or _keeps_up(result, workload)
    return {"status": "STABLE" if served else f"BOUND BY {limit}", "limit": limit}


def _waited_for_s(result: Result) -> float:
    """Busy time in the window from which on a resource can be what the main stream waits for: half of the window."""
    forwards_s = sum(sums["busy_s"] for name, sums in result.stages.items() if name in FORWARD_STAGES)
    blocks = forwards_s / result.main_time_s if result.main_time_s else 0.0
    return (result.block_time_s or 0.0) * blocks / 2


def _keeps_up(result: Result, workload: Workload) -> bool:
    """Whether requests that arrive over time are served as they come.

    A queue shows after the last arrival: what is left takes longer than two answers.
    """
    last_ns = max(request.arrival_ns for request in workload.requests)
    if not last_ns or not result.end_to_end_tok_s:
        return False
    answer_s = max(request.blocks for request in workload.blocked()) * (result.block_time_s or 0.0)
    answer_s += (result.prefill_time_s or 0.0) / max(result.finished, 1)
    return result.delivered_tokens / result.end_to_end_tok_s - last_ns / NS_PER_S < 2 * answer_s
