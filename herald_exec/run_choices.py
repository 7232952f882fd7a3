"""What the options of ``herald-exec run`` mean: a model, a pipeline, requests, and how tokens are accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_exec.footprint import require_host_memory
from herald_pipeline import catalogue, methods
from herald_pipeline import pipeline as pipelines
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.settings import Settings, read_settings
from herald_pipeline.steps import Steps, parse, read_commits, read_steps
from herald_pipeline.workload import Workload

if TYPE_CHECKING:
    from herald_exec.models.base import BlockModel
    from herald_exec.policy import Policy
    from herald_exec.requests import DecodeRequest


@dataclass(frozen=True, slots=True)
class Choices:
    """What the options say, before any of it is looked up."""

    model: str
    method: str
    context: int | None
    batch: int
    blocks: int | None
    gen_tokens: int | None
    steps: str | None
    steps_file: Path | None
    commits: Path | None
    decoder: str | None
    threshold: float | None
    block: int | None
    budget: float | None
    requests: Path | None
    batch_policy: str
    seed: int
    sets: Sequence[str]
    weights: str
    keys: str = "full"


def load_model(choices: Choices, device: str, dtype: str | None, host_limit_gb: float | None = None) -> "BlockModel":
    """Model by name with seeded random weights, or from a folder.

    A run of random weights whose method or lengths are refused, or that this machine's memory cannot hold, is refused
    before they are drawn; ``host_limit_gb`` says what memory there is instead.
    """
    from herald_exec.checkpoints.memory import require_memory, resolve_device, resolve_dtype, total_host_bytes
    from herald_exec.checkpoints.named import open_model
    from herald_exec.models import random_model
    from herald_exec.pools import TORCH_DTYPES

    target, wanted = resolve_device(device), resolve_dtype(dtype)
    if choices.weights not in ("random", "checkpoint"):
        message = f"--weights must be random or checkpoint, got {choices.weights!r}"
        raise ConfigError(message)
    if choices.weights == "checkpoint":
        checkpoint = open_model(choices.model)
        require_memory(checkpoint, target, wanted)
        return checkpoint.load(target, wanted)
    shape = catalogue.resolve(choices.model)
    if wanted is None:
        # fp32 is exact and fast enough on the CPU; a GPU runs what it is built for.
        wanted = resolve_dtype("fp32" if target.type == "cpu" else "bf16")
    assert wanted is not None
    kv = next(name for name, dtype in TORCH_DTYPES.items() if dtype is wanted)
    pipeline = _described(choices, shape, kv)
    lengths = workload(choices, pipeline.settings.block_length)
    if host_limit_gb is None:
        require_host_memory(
            pipeline, lengths, total_host_bytes(), weight_bytes=wanted.itemsize, on_gpu=target.type == "cuda"
        )
    return random_model(shape, choices.seed, device=target, dtype=wanted)


def describe(choices: Choices, model: "BlockModel") -> Pipeline:
    """The method for the model, with KV stored in the model's type."""
    from herald_exec.pools import TORCH_DTYPES

    kv = next(name for name, dtype in TORCH_DTYPES.items() if dtype is model.kv_dtype)
    return _described(choices, model.shape, kv)


def _described(choices: Choices, shape: ModelShape, kv: str) -> Pipeline:
    changes: dict[str, Any] = {
        "block_length": shape.block_length if choices.block is None else choices.block,
        "kv_dtype": kv,
        "dram_kv_dtype": kv,
        "keys": choices.keys,
    }
    if choices.budget is not None:
        changes["budget"] = choices.budget
    given = {"block_length": choices.block, "budget": choices.budget, "keys": None if choices.keys == "full" else 1}
    changes.update(read_settings(choices.sets, [name for name, value in given.items() if value is not None]))
    return pipelines.build(shape, methods.get(choices.method), **changes)


def plan(choices: Choices, settings: Settings) -> Steps | None:
    """Denoising steps of each block, or ``None`` where confidences decide."""
    block_length = settings.block_length
    given = {
        "--steps": choices.steps,
        "--steps-file": choices.steps_file,
        "--commits": choices.commits,
        "--decoder": choices.decoder,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        message = f"{' and '.join(named)} each say how many steps a block takes: give one"
        raise ConfigError(message)
    if choices.threshold is not None and choices.decoder is None:
        message = "--threshold belongs to a --decoder; with steps that are planned nothing reads it"
        raise ConfigError(message)
    if choices.decoder is not None:
        return None
    if choices.steps_file is not None:
        return read_steps(choices.steps_file, block_length)
    if choices.commits is not None:
        if settings.window_length > block_length:
            message = (
                "--commits: a recording of a window that slides counts the tokens of the whole window and does not say "
                "which they were, so it cannot be repeated for real; replay it with `herald-sim run --method "
                f"{choices.method} --commits {choices.commits}`"
            )
            raise ConfigError(message)
        return read_commits(choices.commits, block_length)
    return parse(choices.steps or str(min(20, block_length)), block_length, choices.seed)


def policy(choices: Choices, steps: Steps | None, mask_token_id: int) -> "Policy":
    """How tokens are accepted: by the plan, or by a rule over the model's confidences."""
    from herald_exec.policy import PlannedPolicy, RulePolicy
    from herald_pipeline.decoding import acceptance
    from herald_pipeline.decoding.sampling import Sampler

    sampler = Sampler(mask_token_id=mask_token_id)
    if steps is not None:
        return PlannedPolicy(steps, sampler, seed=choices.seed)
    assert choices.decoder is not None
    params = {} if choices.threshold is None else {"threshold": choices.threshold}
    return RulePolicy(acceptance.get(choices.decoder, **params), sampler, seed=choices.seed)


def workload(choices: Choices, block_length: int) -> Workload:
    """Requests as lengths."""
    if choices.requests is not None:
        if choices.context is not None or choices.blocks is not None or choices.gen_tokens is not None:
            message = "--requests states lengths itself: leave out --context, --blocks and --gen-tokens"
            raise ConfigError(message)
        return Workload.from_csv(
            choices.requests, choices.batch, block_length=block_length, policy=choices.batch_policy
        )
    if choices.context is None:
        message = "--context is missing: completed KV entries per request when decoding starts"
        raise ConfigError(message)
    if choices.blocks is not None and choices.gen_tokens is not None:
        message = "--blocks and --gen-tokens both say how long an answer is: give one"
        raise ConfigError(message)
    if choices.blocks is not None:
        raise_problems([check_number(choices.blocks, "blocks", minimum=1, integer=True)])
    gen_tokens = choices.gen_tokens if choices.blocks is None else choices.blocks * block_length
    return Workload.uniform(
        choices.context, choices.batch, gen_tokens=gen_tokens, block_length=block_length, policy=choices.batch_policy
    )


def draw_requests(lengths: Workload, vocab_size: int, mask_token_id: int, seed: int) -> list["DecodeRequest"]:
    """Prompts of seeded random tokens; what a request holds depends on its id and the seed alone."""
    import torch

    from herald_exec.requests import DecodeRequest

    found = []
    for request in lengths.requests:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + request.id)
        tokens = torch.randint(0, vocab_size - 1, (request.prompt_tokens,), generator=generator)
        # One id is left out, the mask's: speed runs hold ordinary text only.
        tokens += tokens >= mask_token_id
        found.append(DecodeRequest(request.id, tuple(tokens.tolist()), request.new_tokens, request.arrival_ns))
    return found
