"""A ragged batch of prompts, each followed by masks: tokens, which of them are masks, and where each row ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import Attention, ModelShape


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows ``[R, L]``.

    ``tokens`` and ``masked`` travel together, so that a literal mask token in a prompt is an ordinary token.
    ``prompt`` and ``response`` are lengths ``[R]``; ``seeds [R]`` belong to the requests.
    """

    tokens: Tensor
    masked: Tensor
    prompt: Tensor
    response: Tensor
    seeds: Tensor

    @property
    def end(self) -> Tensor:
        """``[R]``: one past each row's last position."""
        return self.prompt + self.response

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        parts = (self.tokens, self.masked, self.prompt, self.response, self.seeds)
        return Batch(*(part.to(device) for part in parts))

    def row(self, index: int) -> "Batch":
        """One row as a batch of its own, without padding."""
        one = slice(index, index + 1)
        length = int(self.end[index])
        return Batch(
            tokens=self.tokens[one, :length],
            masked=self.masked[one, :length],
            prompt=self.prompt[one],
            response=self.response[one],
            seeds=self.seeds[one],
        )


def _prompt_problems(index: int, prompt: Sequence[int], vocab_size: int) -> list[str | None]:
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    return [
        f"prompt {index} is empty; give it at least one token" if not prompt else None,
        f"prompt {index} holds token {outside[0]}, outside the vocabulary of {vocab_size}" if outside else None,
    ]


def make_batch(
    shape: ModelShape,
    prompts: Sequence[Sequence[int]],
    response_length: int,
    *,
    seeds: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Batch:
    """Prompts (token ids) with ``response_length`` masks behind each.

    Raises
    ------
    ConfigError
        The model is not bidirectional, a prompt is empty or leaves the vocabulary, a length is not a count.
    """
    if shape.attention is not Attention.BIDIRECTIONAL:
        message = (
            f"model {shape.name!r} is block-causal: its blocks are fixed and its KV does not age, so block "
            "schedulers and caches do not apply; use a bidirectional model (LLaDA, Dream), or herald-exec run"
        )
        raise ConfigError(message)
    problems = [check_number(response_length, "response_length", minimum=1, integer=True)]
    problems += [None if prompts else "no prompts; give at least one"]
    for index, prompt in enumerate(prompts):
        problems += _prompt_problems(index, prompt, shape.vocab_size)
    if seeds is not None and len(seeds) != len(prompts):
        problems.append(f"{len(seeds)} seeds for {len(prompts)} prompts; give one a prompt")
    raise_problems(problems)
    # Put together in host memory: on a GPU every prompt would be a copy of its own.
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max()) + response_length
    tokens = torch.full((len(prompts), width), shape.mask_token_id, dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    place = torch.arange(width)[None, :]
    return Batch(
        tokens=tokens,
        masked=(place >= lengths[:, None]) & (place < lengths[:, None] + response_length),
        prompt=lengths,
        response=torch.full_like(lengths, response_length),
        seeds=torch.as_tensor(seeds if seeds is not None else [0] * len(prompts), dtype=torch.int64),
    ).to(device)
