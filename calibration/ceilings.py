"""Fig. 5 measured: each ceiling predicted, measured by its protocol, and what the method that should hit it reached.

Three numbers a ceiling, none made of another: **predicted** from the profile's rates; **protocol** from the cell
``ceiling:..``, which a process of its own ran; **achieved** from the cell ``run:..`` of the method, end to end. Beside
them the **bound**, work over the raw rate that the cell ``rates`` found: achieved / bound above 1 says that one of the
two was measured wrongly, and is an error. Without that cell only ceilings that state such a rate themselves (a kernel
that of its pool, a paced link its pace) have a bound; of the others is said what is missing.

A kernel's protocol lies in a few gigabytes of host memory, and says at what rate these can be read, and what the
host's arithmetic reached beside it. It is predicted with these rates, as ``reconcile`` predicts a run with those beside
it (:mod:`calibration.drift`). The protocol calls the kernel alone: what the executor adds to a launch is no part of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from calibration import conditions, drift
from calibration.cells import (
    POINT_KEYS,
    Ran,
    arithmetic_rates,
    check_arithmetic,
    documents,
    failed,
    many_queries_rates,
    pool_rates,
    runs_of,
    unreadable,
)
from herald_pipeline import pipeline as pipelines
from herald_pipeline.errors import ConfigError, ProfileError, check_number, raise_problems, unknown_name
from herald_pipeline.hardware import Profile, known
from herald_pipeline.model import KVDtype, ModelShape
from herald_pipeline.stages import Mode, RowGroup, launch_shape
from herald_pipeline.units import GB, NS_PER_S
from herald_sim.cost import CostModel

Say = Callable[[str], None]
BUDGET = 0.05
PREDICTED_WITHIN = 0.05
HIT_BY: Mapping[str, str] = {
    "full_kv_fetch_per_step": "layer-prefetch",
    "sparse_fetch_per_step": "step-fetch",
    "sparse_fetch_per_block": "herald",
    "cpu_32q_kernel": "mage-cpu",
    "cpu_1q_kernel": "herald",
    "gpu_full_kv_forward": "dense",
    "gpu_sparse_forward": "ideal",
}
"""Ceiling -> the method whose own ceiling it is: end to end it should come near, and cannot pass."""


_RATES = ("h2d_gb_s", "dram_read_gb_s", "hbm_copy_gb_s", "hbm_read_gb_s", "gemm_tflop_s")
"""What the bounds are made of, in the cell ``rates``."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A cell of a ceiling: its name, where it was taken, and seconds of a block by the protocol.

    ``beside`` are rates of the host beside a kernel's protocol, means of before and after: a plain read of its own
    pool, and the kernels' widest arithmetic.
    """

    name: str
    context: int
    batch: int
    steps: int
    block_s: float
    options: Mapping[str, Any]
    beside: drift.Beside = drift.UNKNOWN


def measured(folder: Path, model: str, say: Say) -> tuple[list[Protocol], Mapping[str, float]]:
    """Ceilings of ``model`` in a folder of cells, and the raw rates measured beside them; none where no cell has them.

    Raises
    ------
    ConfigError
        There is no ceiling, or a cell holds what no machine has.
    """
    found, rates = [], {}
    for path, document in documents(folder):
        name = str(document.get("cell", ""))
        if not name.startswith(("rates", "ceiling:")) or failed(document, say):
            continue
        if name != "rates" and document.get("model", model) != model:
            say(f"{name}: left out, it ran {document['model']}")
            continue
        try:
            if name == "rates":
                rates = {key: float(document["result"][key]) for key in _RATES}
                raise_problems(check_number(value, key, above=0) for key, value in rates.items())
            else:
                found.append(_protocol(name, document["result"]))
        except ConfigError as problem:
            raise ConfigError([f"{path}: {found}" for found in problem.problems]) from None
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise unreadable(path, problem) from None
    if not found:
        how = f"python -m benchmarks.gpu --plan ceilings --model {model} --out {folder}"
        raise ConfigError(f"{folder} holds no ceiling of {model}; {how} makes it")
    return found, rates


def _protocol(name: str, result: Mapping[str, Any]) -> Protocol:
    ceiling, *options = name.split(":")[1:2] + name.split(":")[4:]
    if ceiling not in HIT_BY:
        raise unknown_name("ceiling", ceiling, HIT_BY)
    at = {key: int(result[key]) for key in ("context", "batch", "steps")}
    problems = [check_number(value, key, minimum=1) for key, value in at.items()]
    raise_problems([*problems, check_number(result["block_s"], "block_s", above=0)])
    given: dict[str, str] = dict(part.split("=") for part in options)
    conditions.check(_met(given))
    place = (at["context"], at["batch"], at["steps"])
    return Protocol(ceiling, *place, float(result["block_s"]), given, _beside(ceiling, result))


def _met(options: Mapping[str, str]) -> conditions.Conditions:
    """What the options of a cell's name change of the machine."""
    return tuple((key, value) for key, value in options.items() if key not in POINT_KEYS)


def _beside(ceiling: str, result: Mapping[str, Any]) -> drift.Beside:
    # The first cells state the faster of two reads, and not both.
    read = pool_rates(result) or [rate for rate in (result.get("pool_read_gb_s"),) if rate is not None]
    raise_problems(check_number(rate, "pool_read_gb_s", above=0) for rate in read)
    check_arithmetic(result)
    many_queries = ceiling == "cpu_32q_kernel"
    of_arithmetic = (arithmetic_rates(result), many_queries_rates(result)) if many_queries else ([], [])
    known = [fmean(rates) if rates else None for rates in (read, *of_arithmetic)]
    return drift.Beside(many_queries, *known)


def compare(
    folder: Path, profile: Profile | None, shape: ModelShape, say: Say, raw: Path | None = None
) -> dict[str, Any]:
    """A row a ceiling and run of its method; ``errors`` names each achieved / bound above 1.

    ``raw`` is the folder of the profile's raw tables, which some conditions of a ceiling need.
    """
    protocols, rates = measured(folder, shape.name, say)
    runs = [run for run in runs_of(folder, say) if run.model == shape.name]
    rows = [row for protocol in protocols for row in _rows(protocol, rates, runs, profile, shape, raw)]
    errors = [
        f"{row['name']}: {row['method']} reached {row['achieved_tok_s']:.1f} tok/s, above the bound of "
        f"{row['bound_tok_s']:.1f}: a rate or the run was measured wrongly"
        for row in rows
        if row.get("achieved_over_bound", 0.0) > 1.0
    ]
    return {"model": shape.name, "profile": None if profile is None else profile.name, "rows": rows, "errors": errors}


def _rows(
    protocol: Protocol,
    rates: Mapping[str, float],
    runs: list[Ran],
    profile: Profile | None,
    shape: ModelShape,
    raw: Path | None,
) -> Iterator[dict[str, Any]]:
    """The ceiling beside every run of its method at its context and under its conditions; alone where none ran."""
    base: dict[str, Any] = {
        "name": protocol.name,
        "context": protocol.context,
        "link": protocol.options.get("link"),
        "steps": protocol.steps,
        "batch": protocol.batch,
        "protocol_tok_s": protocol.batch * shape.block_length / protocol.block_s,
    }
    if profile is not None:
        met = _met(protocol.options)
        slower = drift.slower(protocol.beside, met, profile, raw)
        under = conditions.slowed(conditions.under(profile, met, raw), **slower)
        foretold = _tok_s(foretold_block_s(protocol, under, shape), protocol.batch, shape)
        base |= {"foretold_tok_s": foretold, "foretold_error": foretold / base["protocol_tok_s"] - 1, **slower}
        stated = {
            "pool_read_gb_s": protocol.beside.dram_gb_s,
            "peak_tflop_s": protocol.beside.peak_tflop_s,
            "many_queries_gb_s": protocol.beside.many_queries_gb_s,
        }
        base |= {name: rate for name, rate in stated.items() if rate is not None}
    of_method = [run for run in runs if _belongs(run, protocol)]
    rates = rates or _own_rates(protocol)
    missing = [name for name in _needs(protocol) if name not in rates]
    if missing:
        base["no_bound"] = f"no bound without {' and '.join(missing)}, which the cell rates measures"

    def bound(batch: int) -> dict[str, float]:
        at = replace(protocol, batch=batch)
        return {} if missing else {"bound_tok_s": _tok_s(bound_block_s(at, rates, shape), batch, shape)}

    if not of_method:
        yield {**base, **bound(protocol.batch)}
    for run in of_method:
        point, achieved = run.sample.point, run.sample.figures["throughput_tok_s"]
        limit = bound(point.batch)
        yield {
            **base,
            "method": point.method,
            "achieved_batch": point.batch,
            **{name: value for name, value in point.conditions if name == "policy"},
            "achieved_tok_s": achieved,
            "achieved_over_protocol": achieved / base["protocol_tok_s"],
            **limit,
            **({"achieved_over_bound": achieved / limit["bound_tok_s"]} if limit else {}),
        }


def _own_rates(protocol: Protocol) -> dict[str, float]:
    """Raw rates that a protocol states itself."""
    if "link" in protocol.options:
        return {"h2d_gb_s": float(protocol.options["link"])}
    return {} if protocol.beside.dram_gb_s is None else {"dram_read_gb_s": protocol.beside.dram_gb_s}


def _needs(protocol: Protocol) -> tuple[str, ...]:
    """Raw rates that the bound is made of."""
    if "fetch" in protocol.name:
        return ("h2d_gb_s",)
    return (
        ("dram_read_gb_s",) if protocol.name.startswith("cpu") else ("hbm_copy_gb_s", "hbm_read_gb_s", "gemm_tflop_s")
    )


def _belongs(run: Ran, protocol: Protocol) -> bool:
    point = run.sample.point
    met = {name: float(value) for name, value in point.conditions if name == "link"}
    wanted = {name: float(value) for name, value in protocol.options.items() if name == "link"}
    # Whoever gathers what a step fetches, the same bytes cross the link; and whether the batch is scanned as a whole or
    # as two halves, the same kernel scans the same bytes.
    alike = {"fetch_per_step": "gather", "kernel": "policy"}
    also = [name for ending, name in alike.items() if protocol.name.endswith(ending)]
    others = [name for name, _ in point.conditions if name not in ("link", "hbm", *also)]
    same = point.method == HIT_BY[protocol.name] and point.context == protocol.context and point.steps == protocol.steps
    return same and met == wanted and not others and point.budget in (None, BUDGET)


def _tok_s(block_s: float, batch: int, shape: ModelShape) -> float:
    return batch * shape.block_length / block_s


# Bounds by raw rates, and predictions by the profile ----------------------------------------------------------------


def _fetched(protocol: Protocol, shape: ModelShape) -> tuple[float, int]:
    """Bytes of a layer of the whole batch that cross the link, and how often in a block."""
    entries = protocol.context if protocol.name.startswith("full") else max(1, int(BUDGET * protocol.context))
    times = protocol.steps if protocol.name.endswith("per_step") else 1
    return protocol.batch * entries * shape.kv_bytes_per_token_layer(KVDtype.BF16), times


def bound_block_s(protocol: Protocol, rates: Mapping[str, float], shape: ModelShape) -> float:
    """Seconds of a block that one raw rate leaves: bytes over the link, of host memory, or of device memory."""
    if "fetch" in protocol.name:
        size, times = _fetched(protocol, shape)
        link = min(rates["h2d_gb_s"], float(protocol.options.get("link", rates["h2d_gb_s"])))
        return size * shape.num_layers * times / (link * GB)
    scanned = protocol.batch * protocol.context * shape.kv_bytes_per_token(KVDtype.BF16)
    if protocol.name.startswith("cpu"):
        return scanned / (rates["dram_read_gb_s"] * GB)
    share = 1.0 if protocol.name == "gpu_full_kv_forward" else _sparse_share(shape)
    # Of the experts only those that one token needs: the rows of a step are much alike (most are masks) and may agree.
    weights = 2.0 * shape.active_params
    rate = max(rates["hbm_copy_gb_s"], rates["hbm_read_gb_s"]) * GB
    tokens = protocol.batch * shape.block_length
    # The head sees the masked positions only: left out.
    flops_s = 2.0 * tokens * (shape.active_params - shape.vocab_size * shape.hidden_size)
    flops_s /= rates["gemm_tflop_s"] * 1e12
    return protocol.steps * (share * scanned / rate + max(weights / rate, flops_s))


def _sparse_share(shape: ModelShape) -> float:
    """Share of the full KV that a sparse step reads: two exact layers, the budget of the others."""
    exact = pipelines.build(shape, "herald").settings.exact_layers
    return (exact + (shape.num_layers - exact) * BUDGET) / shape.num_layers


def foretold_block_s(protocol: Protocol, profile: Profile, shape: ModelShape) -> float:
    """Seconds of a block by the profile alone: the cost model's price of what the protocol does."""
    if "fetch" in protocol.name:
        size, times = _fetched(protocol, shape)
        return size * shape.num_layers * times / (known(profile.machine.link.h2d_gb_s).at(size).value * GB)
    if protocol.name.startswith("gpu"):
        # Both leave the device no rest, and the protocol waits until its clock has settled.
        pipeline = pipelines.build(shape, HIT_BY[protocol.name])
    else:
        queries = shape.block_length if protocol.name == "cpu_32q_kernel" else 1
        pipeline = pipelines.build(shape, "mage-cpu-representative", queries=queries, budget=BUDGET)
        engine = replace(profile.engine, select_overhead_us=None, stage_overhead_us=None)
        profile = replace(profile, engine=engine)
    rows = tuple(range(protocol.batch))
    selected = pipeline.settings.selected_tokens(protocol.context)
    entries = protocol.batch * protocol.context
    costs = CostModel(pipeline, profile)
    if protocol.name.startswith("cpu"):
        group = RowGroup(rows, (0,) * len(rows), Mode.DENOISE, entries, 0, 0)
        shaped = launch_shape((group,), pipeline.settings.block_length)
        cost = costs.stage_cost(pipeline.stage("select"), shaped, shape.num_layers - 1)
        return shape.num_layers * cost.total_ns / NS_PER_S
    group = RowGroup(rows, (0,) * len(rows), Mode.DENOISE, entries, protocol.batch * selected, 0)
    shaped = launch_shape((group,), pipeline.settings.block_length)
    return protocol.steps * costs.stage_cost(pipeline.template.denoise, shaped, None).total_ns / NS_PER_S


def check(found: Mapping[str, Any]) -> None:
    """Refuse a comparison in which something passed its bound.

    Raises
    ------
    ProfileError
        With each achieved / bound above 1.
    """
    if found["errors"]:
        raise ProfileError("achieved / bound above 1:\n" + "\n".join(found["errors"]))
