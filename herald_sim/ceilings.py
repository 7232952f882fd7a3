"""Ceilings: what each resource alone allows, in closed form (HERALD, Fig. 5).

A ceiling is tokens of a block over the time that one resource needs for them, everything else free. The ceilings of a
scheme stand together; the lowest of them is what the scheme cannot pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from herald_pipeline import pipeline as pipelines
from herald_pipeline.errors import check_number, raise_problems
from herald_pipeline.hardware import Profile, Quantity, known
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.stages import Mode, RowGroup, launch_shape
from herald_pipeline.units import NS_PER_S
from herald_sim.cost import CostModel, needs

ASSUMED_BATCH = 80
"""Batch of the sparse forward where none is given: the paper prints the ceiling without its batch."""
ENDLESS_BATCH = 1 << 20
"""Stands for a batch without end: fixed costs vanish."""

SCHEMES: Mapping[str, tuple[str, ...]] = {
    "dense, device memory without end": ("gpu_full_kv_forward",),
    "full KV fetched each step": ("full_kv_fetch_per_step", "gpu_full_kv_forward"),
    "sparse KV fetched each step": ("sparse_fetch_per_step", "gpu_sparse_forward"),
    "CPU selection, all queries, once a block": (
        "sparse_fetch_per_block",
        "cpu_32q_attention",
        "cpu_32q_kernel",
        "gpu_sparse_forward",
    ),
    "CPU selection, one query, once a block": ("sparse_fetch_per_block", "cpu_1q_kernel", "gpu_sparse_forward"),
}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One ceiling: its value in tokens per second, its formula, and what went in with its provenance."""

    name: str
    resource: str
    value_tok_s: float
    formula: str
    inputs: Mapping[str, Any]
    provenance: Mapping[str, str]


@dataclass(frozen=True)
class _Point:
    """Model, machine and workload of one set of ceilings."""

    model: ModelShape
    profile: Profile
    context: int
    steps: int
    sparse: Pipeline
    dense: Pipeline

    @property
    def block(self) -> int:
        return self.sparse.settings.block_length

    @property
    def kv_bytes(self) -> float:
        """KV of one request, all layers, as it crosses the link."""
        return self.context * self.model.kv_bytes_per_token(self.sparse.settings.kv_dtype)

    def per_second(self, block_ns: float, requests: int = 1) -> float:
        return requests * self.block * NS_PER_S / block_ns


def ceilings(
    model: ModelShape,
    profile: Profile,
    context: int,
    *,
    budget: float = 0.05,
    steps: int = 20,
    batch: int | None = None,
    block_length: int | None = None,
) -> list[dict[str, Any]]:
    """Rows ``{name, scheme, resource, value_tok_s, binding, formula, inputs, provenance}``, grouped by scheme.

    ``binding`` marks the lowest of a scheme. ``batch`` is that of the sparse forward (80); the full-KV forward is taken
    at a batch without end, as a bound of what more memory could bring.
    """
    raise_problems(
        [
            check_number(context, "context", minimum=1, integer=True),
            check_number(budget, "budget", above=0, maximum=1),
            check_number(steps, "steps", minimum=1, integer=True),
            None if batch is None else check_number(batch, "batch", minimum=1, maximum=ENDLESS_BATCH, integer=True),
            None if block_length is None else check_number(block_length, "block", minimum=1, integer=True),
        ]
    )
    block = model.block_length if block_length is None else block_length
    raise_problems([check_number(steps, "steps", maximum=block)])
    # Everything else being free, forward follows forward: the device has no rest, as under ``ideal`` itself.
    sparse = pipelines.build(model, "ideal", block_length=block, budget=budget)
    selecting = pipelines.build(model, "mage-cpu-representative", block_length=block, budget=budget)
    dense = pipelines.build(model, "dense", block_length=block)
    profile.check_complete(needs(sparse) | needs(selecting) | needs(dense))
    point = _Point(model, profile, context, steps, sparse, dense)
    found = {ceiling.name: ceiling for ceiling in _all(point, batch)}
    rows = []
    for scheme, names in SCHEMES.items():
        lowest = min(names, key=lambda name: found[name].value_tok_s)
        for name in names:
            ceiling = found[name]
            rows.append(
                {
                    "name": name,
                    "scheme": scheme,
                    "resource": ceiling.resource,
                    "value_tok_s": ceiling.value_tok_s,
                    "binding": name == lowest,
                    "formula": ceiling.formula,
                    "inputs": dict(ceiling.inputs),
                    "provenance": dict(ceiling.provenance),
                }
            )
    return rows


def _all(point: _Point, batch: int | None) -> list[Ceiling]:
    block = point.block
    return [
        _fetch(point, "full_kv_fetch_per_step", 1.0, point.steps),
        _fetch(point, "sparse_fetch_per_step", point.sparse.settings.budget, point.steps),
        _fetch(point, "sparse_fetch_per_block", point.sparse.settings.budget, 1),
        _attention(point, block),
        _kernel(point, "cpu_32q_kernel", block, batch or ASSUMED_BATCH),
        _kernel(point, "cpu_1q_kernel", 1, batch or ASSUMED_BATCH),
        _forward(point, "gpu_full_kv_forward", point.dense, ENDLESS_BATCH, "without end"),
        _forward(
            point,
            "gpu_sparse_forward",
            point.sparse,
            batch or ASSUMED_BATCH,
            str(batch) if batch else f"{ASSUMED_BATCH} (assumed)",
        ),
    ]


def _fetch(point: _Point, name: str, share: float, times: int) -> Ceiling:
    """KV over the link; ``share`` of the full cache, ``times`` a block."""
    link = known(point.profile.machine.link.h2d_gb_s)
    block_ns = times * share * point.kv_bytes / link.peak
    inputs = {"B": point.block, "times": times, "share": share, "kv_bytes": point.kv_bytes, "h2d_gb_s": link.peak}
    formula = "B / (times x share x kv_bytes / h2d)"
    return Ceiling(name, "h2d link", point.per_second(block_ns), formula, inputs, _sources(h2d_gb_s=link))


def _attention(point: _Point, queries: int) -> Ceiling:
    """Attention of all queries on the CPU at its raw rate: the longer of computing and reading."""
    model, machine = point.model, point.profile.machine
    cpu, dram = known(machine.cpu.attention_tflop_s), known(machine.dram.read_gb_s)
    flops = 4.0 * queries * model.num_heads * model.head_dim * point.context * model.num_layers
    block_ns = max(flops / (cpu.peak * 1e3), point.kv_bytes / dram.peak)
    inputs = {
        "B": point.block,
        "queries": queries,
        "flops": flops,
        "kv_bytes": point.kv_bytes,
        "attention_tflop_s": cpu.peak,
        "dram_gb_s": dram.peak,
    }
    formula = "B / max(4 x queries x heads x head_dim x S x layers / attention_tflop_s, kv_bytes / dram)"
    resource = "cpu" if flops / (cpu.peak * 1e3) >= point.kv_bytes / dram.peak else "dram"
    sources = _sources(attention_tflop_s=cpu, dram_gb_s=dram)
    return Ceiling("cpu_32q_attention", resource, point.per_second(block_ns), formula, inputs, sources)


def _kernel(point: _Point, name: str, queries: int, batch: int) -> Ceiling:
    """The whole selection kernel (attention, scores, top-k), as the engine's efficiencies say at a batch's bytes."""
    engine = point.profile.engine
    pipeline = pipelines.build(
        point.model,
        "mage-cpu-representative",
        block_length=point.block,
        queries=queries,
        budget=point.sparse.settings.budget,
    )
    rows = tuple(range(batch))
    group = RowGroup(rows, (0,) * batch, Mode.DENOISE, batch * point.context, 0, 0)
    shape = launch_shape((group,), point.block)
    cost = CostModel(pipeline, point.profile).stage_cost(pipeline.stage("select"), shape, point.model.num_layers - 1)
    block_ns = point.model.num_layers * cost.total_ns
    machine = point.profile.machine
    dram, cpu = known(machine.dram.read_gb_s), known(machine.cpu.attention_tflop_s)
    dram_share, flops_share = known(engine.select_dram_efficiency), known(engine.select_flops_efficiency)
    by_size = engine.select_size_cost if queries > 1 else None
    inputs = {
        "B": point.block,
        "queries": queries,
        "layers": point.model.num_layers,
        "batch": batch,
        "layer_bytes": cost.dram_bytes,
        "dram": dram.peak,
        "dram_share": dram_share.at(cost.dram_bytes).value,
        "layer_flops": cost.flops,
        "attention_tflop_s": cpu.peak,
        "flops_share": flops_share.at(queries).value / (1.0 if by_size is None else by_size.at(cost.dram_bytes).value),
        "layer_ns": cost.total_ns,
    }
    sources = _sources(
        dram_gb_s=dram,
        attention_tflop_s=cpu,
        select_dram_efficiency=dram_share,
        select_flops_efficiency=flops_share,
        **({} if by_size is None else {"select_size_cost": by_size}),
    )
    formula = (
        "batch x B / (layers x (layer_bytes / (dram x dram_share) + layer_flops / (attention_tflop_s x flops_share)))"
    )
    return Ceiling(name, "cpu selection", point.per_second(block_ns, batch), formula, inputs, sources)


def _forward(point: _Point, name: str, pipeline: Pipeline, batch: int, said: str) -> Ceiling:
    """T denoising forwards on the GPU; the completing forward is left out, as it is of the fetch ceilings."""
    costs = CostModel(pipeline, point.profile)
    stage = pipeline.template.denoise
    selected = pipeline.settings.selected_tokens(point.context)

    group = RowGroup(tuple(range(batch)), (0,) * batch, Mode.DENOISE, batch * point.context, batch * selected, 0)
    step_ns = costs.stage_cost(stage, launch_shape((group,), point.block), None).total_ns
    block_ns = point.steps * step_ns
    inputs = {
        "B": point.block,
        "T": point.steps,
        "batch": said,
        "step_ns_per_request": step_ns / batch,
        "kv_tokens": selected if pipeline is point.sparse else point.context,
    }
    engine, gpu = point.profile.engine, point.profile.machine.gpu
    sources = _sources(
        bandwidth_gb_s=known(gpu.bandwidth_gb_s),
        peak_tflop_s=known(gpu.peak_tflop_s),
        attention_efficiency=known(engine.attention_efficiency),
        gemm_efficiency=known(engine.gemm_efficiency),
        sampler_passes=known(engine.sampler_passes),
    )
    formula = "batch x B / (T x step); the completing forward is left out, as it is of the fetch ceilings"
    return Ceiling(name, "gpu", point.per_second(block_ns, batch), formula, inputs, sources)


def _sources(**quantities: Quantity) -> dict[str, str]:
    return {name: str(quantity.origin.provenance) for name, quantity in quantities.items()}
