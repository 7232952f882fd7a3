"""What ``herald-exec doctor --model DIR`` looks at: config, tensors, tokenizer and memory, without loading weights."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from herald_exec.checkpoints.folder import Checkpoint, open_checkpoint
from herald_exec.checkpoints.memory import memory_need
from herald_exec.checkpoints.tokenizer import TextTokenizer, load_tokenizer
from herald_pipeline.errors import HeraldError
from herald_pipeline.model import ModelShape

_MASK_TEXT = re.compile(r"<\|?(mdm_)?mask\|?>|\|<MASK>\|", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: ``ok`` or not, and the facts or the remedy."""

    topic: str
    ok: bool
    text: str


def special_token_problems(shape: ModelShape, tokenizer: TextTokenizer) -> list[str]:
    """Where tokenizer and config disagree: vocabulary size, mask token, end tokens."""
    problems = []
    if tokenizer.vocab_size > shape.vocab_size:
        problems.append(
            f"the tokenizer has {tokenizer.vocab_size} ids, the embedding {shape.vocab_size}: files of two models"
        )
    masks = {text: number for text, number in tokenizer.added_tokens().items() if _MASK_TEXT.fullmatch(text)}
    if masks and shape.mask_token_id not in masks.values():
        listed = ", ".join(f"{text} = {number}" for text, number in masks.items())
        problems.append(f"mask token {shape.mask_token_id} by the config, the tokenizer has {listed}")
    wrong = [end for end in (*shape.eos_token_ids, shape.mask_token_id) if end >= shape.vocab_size]
    if wrong:
        problems.append(f"special token ids {wrong} are outside the vocabulary of {shape.vocab_size}")
    if not shape.eos_token_ids:
        problems.append("no end token in config.json or generation_config.json: answers end by length only")
    return problems


def _tokenizer_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        tokenizer = load_tokenizer(checkpoint.folder)
    except HeraldError as error:
        yield Finding("tokenizer", ok=False, text=str(error))
        return
    template = "with chat template" if tokenizer.has_chat_template else "no chat template: prompts are used as they are"
    yield Finding("tokenizer", ok=True, text=f"{tokenizer.vocab_size:,} ids, {template}")
    problems = special_token_problems(checkpoint.shape, tokenizer)
    for problem in problems:
        yield Finding("special tokens", ok=False, text=problem)
    if not problems:
        shape = checkpoint.shape
        ends = ", ".join(map(str, shape.eos_token_ids))
        yield Finding("special tokens", ok=True, text=f"mask {shape.mask_token_id}, end {ends}")


def _memory_finding(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None) -> Finding:
    need = memory_need(checkpoint, device, dtype)
    problem = need.problem(device)
    if problem is not None:
        return Finding("memory", ok=False, text=problem)
    free = "no limit known" if need.available is None else f"{need.available / 1e9:.2f} GB free"
    text = (
        f"{need.weight_bytes / 1e9:.2f} GB of weights on {device} ({free}); "
        f"loading maps {need.largest_shard_bytes / 1e9:.2f} GB of the host at a time"
    )
    return Finding("memory", ok=True, text=text)


def examine_checkpoint(
    folder: Path | str, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> list[Finding]:
    """Findings about a folder; never raises for what is wrong with it."""
    try:
        checkpoint = open_checkpoint(folder)
    except HeraldError as error:
        return [Finding("checkpoint", ok=False, text=str(error))]
    shape = checkpoint.shape
    experts = "" if shape.moe is None else f", {shape.moe.num_experts} experts"
    model = (
        f"{shape.architecture}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}{experts}"
    )
    stored = str(checkpoint.stored_dtype).removeprefix("torch.")
    tensors = f"{len(checkpoint.tensors):,} tensors, {checkpoint.stored_bytes / 1e9:.2f} GB, mostly {stored}; all fit"
    return [
        Finding("model", ok=True, text=model),
        Finding("tensors", ok=True, text=tensors),
        *_tokenizer_findings(checkpoint),
        _memory_finding(checkpoint, device or torch.device("cpu"), dtype),
    ]
