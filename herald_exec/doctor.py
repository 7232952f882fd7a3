"""``herald-exec doctor``: what this machine is, whether everything is built, and whether a small run is right.

herald-exec doctor
herald-exec doctor --profile my-machine.toml --method herald
herald-exec doctor --model DIR
"""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from herald_pipeline.environment import usable_cores
from herald_pipeline.errors import ConfigError, HeraldError
from herald_pipeline.units import GIB


class Finding(NamedTuple):
    """One thing looked at: ``ok`` or not, and the facts or the remedy."""

    topic: str
    ok: bool
    text: str


def machine_findings() -> Iterator[Finding]:
    """Processor, cores, memory, torch, kernels and devices."""
    import torch

    from herald_exec.checkpoints.memory import available_bytes

    cores = usable_cores()
    yield Finding("cores", True, f"{cores} usable ({platform.machine()})")
    if cores < 2:
        yield Finding("streams", True, "one core: main and retrieval share it, so overlap brings nothing here")
    free = available_bytes(torch.device("cpu"))
    yield Finding("memory", True, "no limit known" if free is None else f"{free / GIB:.1f} GiB available")
    yield Finding("torch", True, torch.__version__)
    try:
        from herald_exec import kernels

        found = kernels.capabilities()
        text = f"tier {found['active']} of {', '.join(found['usable'])}; {found['threads']} threads"
        yield Finding("kernels", True, text)
    except (ImportError, HeraldError) as problem:
        yield Finding("kernels", False, str(problem))
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding("cuda", True, ", ".join(devices) if devices else "no device: runs use the CPU, pinned: false")


def run_finding() -> Finding:
    """A small HERALD run at full budget against Dense: token for token."""
    from herald_exec.execution import Options, decode
    from herald_exec.models import tiny
    from herald_exec.requests import DecodeRequest
    from herald_pipeline.pipeline import build

    model = tiny(block_length=8, eos_token_ids=())
    requests = [DecodeRequest(0, tuple(range(2, 40)), 24), DecodeRequest(1, (7, 8, 9), 16)]
    try:
        answers = [
            decode(
                build(model.shape, name, block_length=8, budget=1.0, kv_dtype="fp32", dram_kv_dtype="fp32"),
                model,
                requests,
                options=Options(batch=2, check=True),
            ).answers
            for name in ("dense", "herald")
        ]
    except HeraldError as problem:
        return Finding("run", False, str(problem))
    same = answers[0] == answers[1]
    text = (
        "herald at budget 100% gives dense's tokens" if same else f"herald {answers[1]} differs from dense {answers[0]}"
    )
    return Finding("run", same, text)


def profile_findings(name: str, method: str) -> Iterator[Finding]:
    """Whether a profile can be read and states every number that a method's stages need."""
    from herald_pipeline import hardware_io

    try:
        profile = hardware_io.resolve(name)
        needs = _needs(method)
        profile.check_complete(needs, hardware_io.complete_names(needs))
    except HeraldError as problem:
        yield Finding("profile", False, str(problem))
        return
    yield Finding("profile", True, f"{profile.name} has every number that {method} reads")


def _needs(method: str) -> frozenset[str]:
    """Op kinds and copy layouts of a method's stages."""
    from herald_pipeline import catalogue
    from herald_pipeline.pipeline import build
    from herald_pipeline.stages import LaunchShape, OpKind

    shape = LaunchShape(1, 32, 32, 128, 32, 32, 128 * 32, 2 * 32 * 32, 1, 1)
    found: set[str] = set()
    for stage in build(catalogue.get("llada2-mini"), method).template.stages():
        for layer in stage.layers or (None,):
            for repeat in stage.work(shape, layer):
                for op in repeat.ops:
                    found |= {op.kind, op.layout} if op.kind is OpKind.COPY else {op.kind}
    return frozenset(found)


def doctor(
    profile: Annotated[str | None, typer.Option(help="Profile to check for gaps, by name or path.")] = None,
    method: Annotated[str | None, typer.Option(help="Method that --profile is checked for [herald].")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder to check without loading it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Look at this machine, and at a profile or checkpoint; exit 1 when something is wrong."""
    if method is not None and profile is None:
        raise ConfigError("--method says what --profile is checked for: give a profile, or leave it out")
    findings: list[Finding] = []
    if profile is not None:
        findings += profile_findings(profile, method or "herald")
    elif model is not None:
        from herald_exec.checkpoints.doctor import examine_checkpoint

        findings += [Finding(found.topic, found.ok, found.text) for found in examine_checkpoint(model)]
    else:
        findings += machine_findings()
        findings.append(run_finding())
    healthy = all(finding.ok for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "findings": [finding._asdict() for finding in findings]}))
    else:
        for finding in findings:
            typer.echo(f"{'ok' if finding.ok else 'FAIL':<5}{finding.topic:<16}{finding.text}")
    if not healthy:
        raise typer.Exit(1)
