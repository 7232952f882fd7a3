"""What the command line's options mean: names and texts -> model, pipeline, profile, workload."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from herald_pipeline import catalogue, hardware_io, methods
from herald_pipeline import pipeline as pipelines
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import ConfigError, HeraldError, check_number, raise_problems
from herald_pipeline.hardware import LinkKind, Profile
from herald_pipeline.model import Attention, ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.settings import PREFIX, Settings, read_settings
from herald_pipeline.steps import Steps, parse, read_commits, read_steps
from herald_pipeline.workload import Workload


@dataclass(frozen=True)
class Options:
    """One configuration as the user states it; ``None`` means the default of the method, model or profile."""

    model: str
    method: str
    hardware: str
    context: int | None = None
    batch: int | None = None
    steps: str | None = None
    steps_file: Path | None = None
    commits: Path | None = None
    block: int | None = None
    budget: float | None = None
    kv_dtype: str | None = None
    engine: str | None = None
    gen_tokens: int | None = None
    requests: Path | None = None
    batch_policy: str = "lockstep"
    seed: int = 0
    sets: Sequence[str] = ()
    hbm_limit_gb: float | None = None
    host_limit_gb: float | None = None
    link_limit_gb_s: float | None = None
    keys: str = "full"

    def shape(self) -> ModelShape:
        """The model."""
        return catalogue.resolve(self.model)

    def pipeline(self) -> Pipeline:
        """The method for the model, with the settings given."""
        model = self.shape()
        if model.attention is Attention.BIDIRECTIONAL:
            message = (
                f"{model.name} attends in both directions, so no prefix's KV stays valid and {self.method!r} has no "
                "meaning here: use `run --method dense` with --cache or --scheduler and --commits; `herald-sim models` "
                "shows what goes with what"
            )
            raise ConfigError(message)
        changes: dict[str, Any] = {"block_length": model.block_length if self.block is None else self.block}
        if self.budget is not None:
            changes["budget"] = self.budget
        if self.kv_dtype is not None:
            changes["kv_dtype"] = changes["dram_kv_dtype"] = self.kv_dtype
        if self.keys != "full":
            changes["keys"] = self.keys
        options = {"block_length": self.block, "budget": self.budget, "kv_dtype": self.kv_dtype}
        given = [name for name, value in options.items() if value is not None]
        changes.update(self._settings(given))
        default = methods.get(self.method).defaults
        # All queries means all of the block, whatever its length.
        if "queries" not in changes and default.queries == default.block_length:
            changes["queries"] = changes["block_length"]
        return pipelines.build(model, self.method, **changes)

    def _settings(self, given: Sequence[str]) -> dict[str, Any]:
        """Settings that ``--set`` states; where they are wrong, what is wrong with its other texts is said as well."""
        try:
            return read_settings([text for text in self.sets if text.startswith(PREFIX)], given)
        except ConfigError as problem:
            problems: list[str | None] = [str(problem)]
            try:
                self.profile()
            except HeraldError as other:
                problems.append(str(other))
            raise_problems(problems)
            raise

    def profile(self) -> Profile:
        """Machine and engine, with the overrides given."""
        overrides = [text for text in self.sets if not text.startswith(PREFIX)]
        if self.link_limit_gb_s is not None:
            raise_problems([check_number(self.link_limit_gb_s, "link_limit_gb_s", above=0)])
            profile = hardware_io.resolve(self.hardware, self.engine, overrides)
            link = profile.machine.link
            for name in ("h2d_gb_s", "d2h_gb_s"):
                quantity = getattr(link, name)
                if quantity is None or quantity.peak > self.link_limit_gb_s:
                    overrides.append(f"machine.link.{name}={self.link_limit_gb_s}")
        return _profile(self.hardware, self.engine, tuple(overrides))

    def memory(self, profile: Profile) -> Memory:
        """The profile's memory within the limits given."""
        return Memory.of(profile, hbm_limit_gb=self.hbm_limit_gb, host_limit_gb=self.host_limit_gb)

    def workload(self, settings: Settings, batch: int | None = None) -> Workload:
        """Requests, batch and steps of a pipeline with ``settings``; ``batch`` overrides the one given."""
        block_length = settings.block_length
        plan = self._plan(settings)
        slots = batch if batch is not None else self.batch
        if slots is None:
            message = "--batch is missing: how many requests are decoded together"
            raise ConfigError(message)
        if self.requests is not None:
            if self.context is not None or self.gen_tokens is not None:
                message = "--requests states lengths itself: leave out --context and --gen-tokens"
                raise ConfigError(message)
            return Workload.from_csv(
                self.requests, slots, block_length=block_length, steps=plan, policy=self.batch_policy
            )
        if self.context is None:
            message = "--context is missing: completed KV entries per request when decoding starts"
            raise ConfigError(message)
        return Workload.uniform(
            self.context,
            slots,
            gen_tokens=self.gen_tokens,
            block_length=block_length,
            steps=plan,
            policy=self.batch_policy,
        )

    def _plan(self, settings: Settings) -> Steps | None:
        block_length = settings.block_length
        given = [
            name
            for name, value in (("--steps", self.steps), ("--steps-file", self.steps_file), ("--commits", self.commits))
            if value is not None
        ]
        if len(given) > 1:
            message = f"{' and '.join(given)} both say how many steps a block takes: give one"
            raise ConfigError(message)
        if self.steps is not None:
            return parse(self.steps, block_length, self.seed)
        if self.steps_file is not None:
            return read_steps(self.steps_file, block_length)
        if self.commits is not None:
            return read_commits(self.commits, block_length, settings.window_length)
        return None


@lru_cache(maxsize=256)
def _profile(hardware: str, engine: str | None, overrides: tuple[str, ...]) -> Profile:
    """Profiles are read once a process: a sweep asks for the same ones again and again."""
    return hardware_io.resolve(hardware, engine, overrides)


def resolved(profile: Profile) -> dict[str, Any]:
    """Rates of the profile as they will be used: what a plan rests on, printed before it."""
    machine = profile.machine
    quantities = {
        "hbm_gb_s": machine.gpu.bandwidth_gb_s,
        "gpu_tflop_s": machine.gpu.peak_tflop_s,
        "dram_gb_s": machine.dram.read_gb_s,
        "h2d_gb_s": machine.link.h2d_gb_s,
        "d2h_gb_s": machine.link.d2h_gb_s,
    }
    found = {name: quantity.peak for name, quantity in quantities.items() if quantity is not None}
    link = machine.link
    kind = f"PCIe {link.generation} x{link.lanes}" if link.kind is LinkKind.PCIE else link.kind.value
    return {**found, "link": kind, "engine": profile.engine.name}
