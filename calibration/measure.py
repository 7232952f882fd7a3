"""``calibration measure``: every number that the simulator reads of a machine, obtained on it, with its spread.

Parts run one after another, raw rates first. What one part refuses (samples that disagree) is reported with the samples
and the profile is not written: a number that cannot be repeated is no measurement. What the others found stays, and the
same command goes on from there (:mod:`calibration.unfinished`).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from calibration import parts, profile_file, unfinished
from calibration.bench import Bench, divide_cores
from calibration.host import Host, pcie, software, this_host
from calibration.profile_file import ENGINE, Stamp
from calibration.running import run_parts
from calibration.timing import Plan
from herald_exec import kernels
from herald_pipeline.errors import (
    ConfigError,
    ProfileError,
    check_number,
    did_you_mean,
    raise_problems,
)
from herald_pipeline.model import KVDtype, ModelShape

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured.

    Attributes
    ----------
    shape
        The model at whose shapes products, attention and sampling are measured.
    out
        The profile file; ``None`` names it after the machine, in ``./profiles``.
    only
        Parts to measure anew; the rest stays as an earlier file at ``out`` states it. Empty: all.
    kv_dtype
        Format of KV; ``None`` takes the one the device computes in.
    pcie
        ``GENERATIONxLANES`` where the driver does not say.
    name
        The profile's name; ``None`` is made of the processors' names.
    host_gb
        Host memory in GB where the system does not show all of it (a virtual machine whose memory grows when touched).
    """

    shape: ModelShape
    device: str = "cpu"
    out: Path | None = None
    only: tuple[str, ...] = ()
    quick: bool = False
    plan: Plan = field(default_factory=Plan)
    kv_dtype: KVDtype | None = None
    threads: int | None = None
    pcie: str | None = None
    name: str | None = None
    host_gb: float | None = None
    command: str = "python -m calibration measure"


def measure(request: Request, say: Say = lambda line: print(line, file=sys.stderr)) -> Path:
    """Measure this machine and write its profile; returns the file.

    Raises
    ------
    ConfigError
        An unknown part or device.
    ProfileError
        Samples disagree, or a part failed; all parts concerned are named. What the others found is kept in a file
        ``*.incomplete.toml``, from which the same request goes on.
    DeviceLostError
        A part left the device unusable for this process; likewise.
    """
    _check_parts(request.only)
    if request.host_gb is not None:
        raise_problems([check_number(request.host_gb, "--host-gb", above=0)])
    device = _device(request.device)
    host = this_host(device)
    out = request.out or Path("profiles") / f"{request.name or host.slug}.toml"
    bench = _bench(request, device)
    bench.say = say
    so_far = unfinished.path_of(out)
    progress, base = _begin(request, host, bench, out, say)
    bench.base = base
    _remember(bench, base)
    unfinished.take_up(bench, progress)
    stamp = Stamp(request.command, datetime.now(UTC).date().isoformat(), software())

    def keep() -> None:
        """What is known by now, on disk: a machine that is taken away costs the part under way and no other."""
        profile_file.write_unchecked(so_far, profile_file.merge(base, bench.done, stamp), _header(host, bench, request))
        for part in bench.done[-1:]:
            profile_file.write_raw(profile_file.raw_folder(so_far), part)
        known = {*progress.done, *(part.name for part in bench.done)}
        progress.done = [name for name in parts.NAMES if name in known]
        progress.tables = bench.tables
        progress.write(so_far)

    keep()
    names = [name for name in request.only if name not in progress.done] or progress.missing(parts.NAMES)
    refused, lost = run_parts(bench, names, progress.references, say, keep, profile_file.raw_folder(so_far))
    if missing := [] if refused else progress.missing(parts.NAMES):
        refused.append(f"not measured yet: {', '.join(missing)}")
    if not refused:
        try:
            data = profile_file.merge(base, bench.done, stamp)
            profile_file.write(out, data, _header(host, bench, request))
        except ConfigError as problem:
            refused.append(f"profile: {problem}")
    if refused:
        raise (DeviceLostError if lost else ProfileError)(
            f"{out} was not written, because samples disagree, parts failed or values cannot be; what the others found "
            f"is in {so_far}, and the same command again without --only, or with the same, measures what is missing:\n"
            + "\n".join(refused)
        )
    unfinished.finish(so_far, out)
    say(f"wrote {out} and {profile_file.raw_folder(out)}/")
    return out


class DeviceLostError(ProfileError):
    """A part left the device unusable for the rest of this process (an illegal access, a reset)."""

    device_lost = True
    """Read by the command line, which must not free device memory any more."""


def _begin(
    request: Request, host: Host, bench: Bench, out: Path, say: Say
) -> tuple[unfinished.Progress, dict[str, Any]]:
    """Where to begin: with what an ended call of the same measurement left, else anew."""
    options = {
        "model": request.shape.name,
        "device": request.device,
        "cpu": host.cpu_name,
        "gpu": host.gpu_name,
        "threads": len(bench.retrieval_cores),
        "kv_dtype": str(bench.kv_dtype),
        "quick": request.quick,
    }
    so_far = unfinished.path_of(out)
    progress = unfinished.found(so_far, options, request.only)
    if progress is not None:
        shown = ", ".join(progress.done) or "no part"
        say(f"  going on from {so_far} with {shown} (delete it to begin anew)")
        return progress, profile_file.read(so_far)
    if so_far.exists():
        say(f"  {so_far} is of another measurement or an older version: its numbers are not used")
    base = profile_file.read(out) if request.only and out.exists() else _frame(request, host, bench)
    return unfinished.Progress(options, list(request.only)), base


def _check_parts(only: Sequence[str]) -> None:
    problems = [
        f"--only {name}: unknown part{did_you_mean(name, parts.NAMES)}" for name in only if name not in parts.NAMES
    ]
    if problems:
        raise ConfigError(problems)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"--device must be cpu or cuda, got {text!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; leave it out to measure the CPU alone")
    return device


def _bench(request: Request, device: torch.device) -> Bench:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv = request.kv_dtype or (KVDtype.BF16 if device.type == "cuda" else KVDtype.FP32)
    main, retrieval = divide_cores(device, request.threads)
    return Bench(
        request.shape,
        device,
        dtype,
        request.plan,
        kv,
        kv,
        main,
        retrieval,
        block_length=request.shape.block_length,
        quick=request.quick,
        fused=device.type == "cuda",
        host_gb=request.host_gb,
    )


def _remember(bench: Bench, base: dict[str, Any]) -> None:
    """Raw rates of an earlier file, for parts that are measured anew."""
    for section, table in base.get("machine", {}).items():
        for key, quantity in table.items():
            if isinstance(quantity, dict) and ("value" in quantity or "y" in quantity):
                found = quantity["value"] if "value" in quantity else max(quantity["y"])
                bench.found[f"machine.{section}.{key}"] = float(found)


def _frame(request: Request, host: Host, bench: Bench) -> dict[str, Any]:
    """Names and counts: all of a profile that is not a quantity."""
    cpu = {"name": host.cpu_name, "cores": host.cores, "threads": host.threads, "capability": host.capability}
    if not bench.on_cuda:
        data = profile_file.template()
        data["name"] = request.name or host.slug
        data["machine"]["cpu"] = cpu
        cores = len(bench.main_cores)
        data["notes"] = [
            *data.get("notes", []),
            f"{cores} core(s) play the GPU, {bench.retrieval_threads} run retrieval and copies; DRAM is shared.",
            f"Measured at the shapes of {request.shape.name}, KV in {bench.kv_dtype}.",
        ]
        return data
    generation, lanes = pcie(request.pcie)
    return {
        "name": request.name or host.slug,
        "title": f"{host.gpu_name}, {host.cpu_name}, PCIe {generation} x{lanes}",
        "engine": ENGINE,
        "notes": [f"Measured at the shapes of {request.shape.name}, KV in {bench.kv_dtype}."],
        "machine": {
            "gpu": {"name": host.gpu_name, "count": host.gpu_count, "dtype": "bf16"},
            "cpu": cpu,
            "dram": {},
            "link": {"kind": "pcie", "generation": generation, "lanes": lanes},
        },
        "engines": {ENGINE: {"title": "herald-exec on this machine"}},
    }


def _header(host: Host, bench: Bench, request: Request) -> list[str]:
    plan = bench.plan
    return [
        f"Measured on {host.cpu_name} ({host.threads} CPUs usable, kernels {kernels.active_tier()})"
        + (f" with {host.gpu_name}" if host.gpu_name else " without a GPU")
        + f" by: {request.command}",
        f"Each value is the median of at least {plan.repeats} samples after {plan.warmup} thrown away; spread is the",
        "relative standard deviation that their middle half implies. Raw samples lie in the folder of the same name.",
    ]
