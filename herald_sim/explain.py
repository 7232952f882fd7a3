"""Where a block's time goes, and what changes it: critical path, and the effect of 10% more of each thing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from herald_pipeline import pipeline as pipelines
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Curve, Number, Profile, Quantity
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.result import Recorder, Result, warm_up_blocks
from herald_pipeline.scheduling.program import Program
from herald_pipeline.steps import FixedSteps
from herald_pipeline.trace import Span
from herald_pipeline.units import NS_PER_S
from herald_pipeline.workload import DEFAULT_GEN_TOKENS, Workload
from herald_sim.cost import CostModel
from herald_sim.runner import Simulation
from herald_sim.simulate import simulate

MORE = 1.1
"""10% more."""
_LONGEST = DEFAULT_GEN_TOKENS
"""Tokens of an answer that are looked at: those of `run` by default, so that both print the same throughput."""
_RESOURCES = (
    ("gpu", "bandwidth_gb_s", "device memory bandwidth"),
    ("gpu", "peak_tflop_s", "GPU compute"),
    ("dram", "read_gb_s", "host memory bandwidth"),
    ("cpu", "attention_tflop_s", "CPU compute"),
    ("link", "h2d_gb_s", "link, host to device"),
    ("link", "d2h_gb_s", "link, device to host"),
)
_DEAD_BAND_NS = 2


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a run consists of.

    Attributes
    ----------
    path
        Seconds a block that each stage holds on the critical path, longest first; they sum to the block's time.
    changes
        Throughput with one thing changed, relative to the run as it is, largest effect first.
    """

    result: Result
    path: Mapping[str, float]
    changes: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "throughput_tok_s": self.result.throughput_tok_s,
            "block_time_s": self.result.block_time_s,
            "limit": self.result.limit,
            "status": self.result.status,
            **{key: value for key, value in self.result.extra.items() if key == "beyond_memory"},
            "critical_path_s": dict(self.path),
            "changes": dict(self.changes),
        }


def explain(pipeline: Pipeline, profile: Profile, workload: Workload) -> Explanation:
    """Critical path and effects for the first blocks of ``workload``, memory limits left out."""
    length = workload.block_length
    few = tuple(replace(request, new_tokens=min(request.new_tokens, _LONGEST)) for request in workload.requests)
    short = replace(workload, requests=few)
    result = simulate(pipeline, profile, short, beyond_memory=True)
    if result.throughput_tok_s is None:
        message = f"explain needs answers of two blocks or more: pass --gen-tokens {2 * length} or above"
        raise ConfigError(message)
    changes = {}
    for name, changed in _what_if(pipeline, profile, short):
        found = changed().throughput_tok_s
        if found is not None:
            changes[name] = found / result.throughput_tok_s - 1
    ordered = dict(sorted(changes.items(), key=lambda item: -abs(item[1])))
    return Explanation(result, critical_path(pipeline, profile, short), ordered)


def _what_if(pipeline: Pipeline, profile: Profile, workload: Workload) -> Iterator[tuple[str, Callable[[], Result]]]:
    def with_profile(changed: Profile) -> Callable[[], Result]:
        return lambda: simulate(pipeline, changed, workload, beyond_memory=True)

    def with_settings(**settings: Any) -> Callable[[], Result]:
        current = {name: getattr(pipeline.settings, name) for name in type(pipeline.settings).__slots__}
        changed = pipelines.build(pipeline.model, pipeline.method, **{**current, **settings})
        return lambda: simulate(changed, profile, workload, beyond_memory=True)

    for section, name, title in _RESOURCES:
        if getattr(getattr(profile.machine, section), name) is not None:
            yield f"+10% {title}", with_profile(scaled(profile, section, name, MORE))
    if isinstance(workload.steps, FixedSteps):
        more = min(workload.block_length, max(workload.steps.count + 1, round(workload.steps.count * MORE)))
        if more != workload.steps.count:
            steps = replace(workload, steps=FixedSteps(more, workload.block_length))
            yield f"T {workload.steps.count} -> {more}", lambda: simulate(pipeline, profile, steps, beyond_memory=True)
    budget = pipeline.settings.budget
    if 0 < budget < 1:
        yield f"budget {budget:g} -> {budget * MORE:.3g}", with_settings(budget=min(1.0, budget * MORE))
    if pipeline.settings.kv_dtype is KVDtype.BF16:
        yield "KV bf16 -> fp8", with_settings(kv_dtype="fp8", dram_kv_dtype="fp8")


def scaled(profile: Profile, section: str, name: str, factor: float) -> Profile:
    """``profile`` with one machine quantity times ``factor``: a what-if, not bound by what a part can be."""
    part = getattr(profile.machine, section)
    quantity: Quantity = getattr(part, name)
    changed: Quantity
    if isinstance(quantity, Number):
        changed = replace(quantity, value=quantity.value * factor)
    else:
        assert isinstance(quantity, Curve)
        changed = replace(quantity, y=tuple(y * factor for y in quantity.y))
    machine = replace(profile.machine, **{section: replace(part, **{name: changed})})
    return replace(profile, machine=machine)


def critical_path(pipeline: Pipeline, profile: Profile, workload: Workload) -> dict[str, float]:
    """Seconds a block on the path that decides when a block ends, by stage.

    Found backwards from the end of the last block: what a launch waited for last is what held it up. Time in which the
    path waits for the host is ``host``.
    """
    recorder = Recorder("simulated", keep_trace=True)
    program = Program(pipeline, workload.blocked(), slots=workload.batch, policy=workload.policy)
    Simulation(program, CostModel(pipeline, profile), workload.steps, recorder).run()
    assert recorder.trace is not None
    spans = recorder.trace.spans
    ends = [span for span in spans if span.stage == pipeline.template.denoise.name]
    blocks = sorted({span.block for span in ends})
    skipped = min(warm_up_blocks(len(blocks)), len(blocks) - 1)
    start_ns = max((span.end_ns for span in ends if span.block in blocks[:skipped]), default=0)
    held: dict[str, int] = {}
    for name, duration in _backwards(spans, max(ends, key=lambda span: span.end_ns), start_ns):
        held[name] = held.get(name, 0) + duration
    count = len(blocks) - skipped
    ordered = sorted(held.items(), key=lambda item: -item[1])
    return {name: duration / count / NS_PER_S for name, duration in ordered}


def _backwards(spans: list[Span], last: Span, start_ns: int) -> Iterator[tuple[str, int]]:
    by_launch = {span.launch: span for span in spans}
    before: dict[int, Span] = {}
    newest: dict[str, Span] = {}
    for span in sorted(spans, key=lambda span: span.launch):
        if span.stream in newest:
            before[span.launch] = newest[span.stream]
        newest[span.stream] = span
    span, until = last, last.end_ns
    while until > start_ns:
        begin = max(span.start_ns, start_ns)
        yield span.stage, until - begin
        until = begin
        sources = [by_launch[number] for number in span.after if number in by_launch]
        if span.launch in before:
            sources.append(before[span.launch])
        if not sources:
            break
        source = max(sources, key=lambda one: one.end_ns)
        if source.end_ns < until - _DEAD_BAND_NS:
            gap = until - max(source.end_ns, start_ns)
            yield "host", gap
        until = min(until, source.end_ns)
        span = source
