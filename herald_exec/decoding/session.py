"""What both kinds of decoding session share: settings, rows, the pieces they deliver, and where an answer ends."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from herald_exec.models.base import BlockModel
from herald_pipeline.decoding.policy import DecodingPolicy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import check_number, raise_problems
from herald_pipeline.workload import check_length

FinishReason = Literal["end_token", "length", "stopped"]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How to decode.

    Attributes
    ----------
    policy
        Acceptance rule, scheduler and cache rule; its scheduler's block length is B.
    max_new_tokens
        Longest answer, end token not counted.
    temperature, top_p, seed
        Sampling; at temperature 0 nothing is drawn. What a row draws depends on seed, position and step alone, not on
        the batch.
    end_token_ids
        Tokens that end an answer; the model's own by default.
    """

    policy: DecodingPolicy
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    end_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.max_new_tokens, "max_new_tokens", minimum=1, integer=True),
                check_number(self.seed, "seed", minimum=0, integer=True),
            ]
        )

    @property
    def block_length(self) -> int:
        """B."""
        return self.policy.blocks.block_length

    def sampler(self, mask_token_id: int) -> Sampler:
        """Sampler that never chooses MASK."""
        return Sampler(temperature=self.temperature, top_p=self.top_p, mask_token_id=mask_token_id)


class Piece(NamedTuple):
    """Tokens of a row that are final, in order; ``finished`` says why no more will come."""

    row: int
    tokens: list[int]
    finished: FinishReason | None = None


@dataclass(slots=True)
class RowStatistics:
    """Counts of one row: forwards it took part in, blocks completed, tokens delivered."""

    prompt_tokens: int
    forwards: int = 0
    blocks: int = 0
    tokens: int = 0


class Session(ABC):
    """A batch of prompts on its way to answers; every :meth:`step` is one forward of the rows that still run.

    Attributes
    ----------
    statistics
        One :class:`RowStatistics` a prompt, in order.
    """

    def __init__(self, model: BlockModel, prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> None:
        self.model = model
        self.settings = settings
        self.sampler = settings.sampler(model.shape.mask_token_id)
        self.statistics = [RowStatistics(prompt_tokens=len(prompt)) for prompt in prompts]
        ends = settings.end_token_ids
        self._ends = frozenset(model.shape.eos_token_ids if ends is None else ends)
        raise_problems(self._problem(row, prompt) for row, prompt in enumerate(prompts))

    def _problem(self, row: int, prompt: Sequence[int]) -> str | None:
        """Why a prompt cannot run: ids outside the vocabulary, or more positions than the model has."""
        shape, settings = self.model.shape, self.settings
        outside = [token for token in prompt if not 0 <= token < shape.vocab_size]
        if outside:
            return f"prompt {row}: token id {outside[0]} is outside the vocabulary of {shape.vocab_size}"
        return check_length(
            len(prompt), settings.max_new_tokens, settings.block_length, shape.max_positions, f"prompt {row}"
        )

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether any row still runs."""

    @abstractmethod
    def step(self) -> list[Piece]:
        """One forward; the pieces that became final."""

    @abstractmethod
    def stop(self, row: int) -> None:
        """End a row now (a stop word was found); nothing more comes from it."""

    def deliver(self, row: int, tokens: list[int], *, last: bool) -> Piece:
        """Piece of newly final tokens, cut at the first end token and at the longest length allowed.

        ``last``: no positions are left after these.
        """
        statistics = self.statistics[row]
        room = self.settings.max_new_tokens - statistics.tokens
        end = next((i for i, token in enumerate(tokens) if token in self._ends), None)
        finished: FinishReason | None = "length" if last or len(tokens) >= room else None
        if end is not None and end <= room:
            tokens, finished = tokens[:end], "end_token"
        tokens = tokens[:room]
        statistics.tokens += len(tokens)
        return Piece(row, tokens, finished)


class Chosen(NamedTuple):
    """Sampler's choice at every position of a ``[rows, L]`` grid; zeros where nothing was asked for."""

    token: Tensor
    confidence: Tensor
    entropy: Tensor | None


def choose(
    session: Session, hidden: Tensor, wanted: Tensor, positions: Tensor, step: Tensor, *, with_entropy: bool
) -> Chosen:
    """Choose tokens at ``wanted`` ``[rows, L]`` from their hidden states ``[number wanted, H]``, in row-major order.

    ``positions`` ``[rows, L]`` are absolute; ``step`` ``[rows]`` is the round within the block. The softmax is in fp32.
    """
    logits = session.model.logits(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    steps = step[:, None].expand_as(wanted)[wanted]
    # One position a row, so that seeds and steps broadcast along the rows.
    choice = session.sampler(
        logits[:, None],
        seed=session.settings.seed,
        position=positions[wanted][:, None],
        step=steps,
        with_entropy=with_entropy,
    )

    def grid(values: Tensor) -> Tensor:
        return values.new_zeros(wanted.shape).masked_scatter(wanted, values[:, 0])

    entropy = None if choice.entropy is None else grid(choice.entropy)
    return Chosen(grid(choice.token), grid(choice.confidence), entropy)
