"""Requests of the executor, what one row of a launch is, and the rows' state: tokens, masks, drafts, answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herald_pipeline.errors import ConfigError, check_number
from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.scheduling.admission import Request
from herald_pipeline.scheduling.launches import Launch
from herald_pipeline.scheduling.lengths import check_length
from herald_pipeline.stages import Mode
from herald_pipeline.workload import RequestSpec


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """A prompt and how many tokens of answer it may get.

    ``prompt`` holds token ids; the mask's id among them is an ordinary token there, because which positions are masked
    is carried beside the ids.
    """

    id: int
    prompt: tuple[int, ...]
    new_tokens: int
    arrival_ns: int = 0

    def blocked(self, block_length: int) -> Request:
        """The request in whole blocks, as the program takes it."""
        return RequestSpec(self.id, len(self.prompt), self.new_tokens, self.arrival_ns).blocked(block_length)

    @property
    def end(self) -> int:
        """Position behind the last token of the answer."""
        return len(self.prompt) + self.new_tokens


def request_problems(requests: Sequence[DecodeRequest], shape: ModelShape) -> list[str | None]:
    """Everything wrong with ``requests`` for this model: lengths, ids out of the vocabulary, ids used twice."""
    problems: list[str | None] = [] if requests else ["requests: there are none; give at least one prompt"]
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        problems.append("requests: ids must be unique")
    for request in requests:
        where = f"request {request.id}"
        problems.append(check_number(request.new_tokens, f"{where}: new_tokens", minimum=1, integer=True))
        wrong = [token for token in request.prompt if not 0 <= token < shape.vocab_size]
        if wrong:
            problems.append(f"{where}: token id {wrong[0]} is outside the vocabulary of {shape.vocab_size}")
    return problems


@dataclass(frozen=True, slots=True)
class Row:
    """One row of one launch, with everything that an asynchronous action may need to know of it.

    Attributes
    ----------
    prefix
        S: completed positions before the row's block.
    selected, tail
        k and tail entries that this block's steps read.
    to_select
        k that a selection of this block's pass takes: ``floor(budget x S)``.
    """

    slot: int
    request: DecodeRequest
    block: int
    mode: Mode
    prefix: int
    selected: int
    tail: int
    to_select: int

    @property
    def parity(self) -> int:
        """Index of the active buffer of a double-buffered pool; the idle one is the other."""
        return self.block % 2

    @property
    def idle(self) -> int:
        """Index of the idle buffer."""
        return (self.block + 1) % 2


def launch_rows(pipeline: Pipeline, launch: Launch, running: dict[int, DecodeRequest]) -> tuple[Row, ...]:
    """Rows of a launch by slot, taken when it is issued: what runs later must not look at anything that moves on."""
    settings, lookahead = pipeline.settings, pipeline.template.lookahead
    length = settings.block_length
    rows = []
    for group in launch.groups:
        for slot, block in zip(group.slots, group.blocks, strict=True):
            request = running[slot]
            context = len(request.prompt) // length * length
            prefix = context + max(block, 0) * length
            # With a lookahead, block n uses what was selected before block n - 1 (block 0: from the prompt).
            seen = context + max(block - lookahead, 0) * length
            tail = length if lookahead and block > 0 else 0
            rows.append(
                Row(
                    slot,
                    request,
                    block,
                    group.mode,
                    prefix,
                    settings.selected_tokens(seen),
                    tail,
                    settings.selected_tokens(prefix),
                )
            )
    return tuple(sorted(rows, key=lambda row: row.slot))


class RowState:
    """Tokens of all slots, on the device. The main stream writes them; a step 0 on another one reads those of its rows.

    ``tokens [slots, capacity]`` and ``masked`` beside them (True: not decoded yet), ``draft [slots, W]``. ``window`` is
    W, the positions of a forward: B, or more where tokens may be committed ahead of their block.
    """

    def __init__(
        self, slots: int, capacity: int, block_length: int, device: torch.device, window: int | None = None
    ) -> None:
        self.block_length = block_length
        self.window = block_length if window is None else window
        capacity += self.window - block_length
        self.tokens = torch.zeros(slots, capacity, dtype=torch.int64, device=device)
        self.masked = torch.zeros(slots, capacity, dtype=torch.bool, device=device)
        self.draft = torch.zeros(slots, self.window, dtype=torch.int64, device=device)
        self.steps = [0] * slots
        self._begun = [-2] * slots
        self.answers: dict[int, list[int]] = {}
        self.commits: dict[int, list[list[int]]] = {}

    def admit(self, row: Row) -> None:
        """Take a request into its slot: prompt tokens are known, everything behind them is masked."""
        prompt = torch.tensor(row.request.prompt, dtype=torch.int64)
        self.tokens[row.slot] = 0
        self.masked[row.slot] = True
        self.tokens[row.slot, : len(prompt)] = prompt.to(self.tokens.device)
        self.masked[row.slot, : len(prompt)] = False
        self._begun[row.slot] = -1
        self.answers[row.request.id] = []
        self.commits[row.request.id] = []

    def begin(self, row: Row) -> None:
        """Start the row's block, if this launch is its first."""
        if self._begun[row.slot] != row.block:
            self._begun[row.slot] = row.block
            self.steps[row.slot] = 0
            self.commits[row.request.id].append([])

    def gather(self, rows: Sequence[Row], values: Tensor) -> Tensor:
        """Each row's window out of ``values [slots, capacity]``: ``[R, W]``."""
        offsets = torch.arange(self.window, device=values.device)
        starts = torch.tensor([row.prefix for row in rows], device=values.device)
        slots = torch.tensor([row.slot for row in rows], device=values.device)
        return values[slots[:, None], starts[:, None] + offsets]

    def put(self, rows: Sequence[Row], values: Tensor, block: Tensor) -> None:
        """Write ``block [R, W]`` back into ``values [slots, capacity]``."""
        offsets = torch.arange(self.window, device=values.device)
        starts = torch.tensor([row.prefix for row in rows], device=values.device)
        slots = torch.tensor([row.slot for row in rows], device=values.device)
        values[slots[:, None], starts[:, None] + offsets] = block

    def deliver(self, row: Row, eos: Sequence[int], block: Sequence[int] | None = None) -> tuple[int, bool]:
        """Add a completed block to the row's answer: how many tokens, and whether the answer ends with it.

        ``block`` are the block's tokens, where the caller has them already.

        Only positions at or behind the prompt's end count, for EOS too (U09), and none behind ``new_tokens``.
        """
        first = max(row.prefix, len(row.request.prompt))
        last = min(row.prefix + self.block_length, row.request.end)
        if block is None:
            answer = self.tokens[row.slot, first:last].tolist()
        else:
            answer = list(block[first - row.prefix : last - row.prefix])
        for index, token in enumerate(answer):
            if token in eos:
                self.answers[row.request.id] += answer[: index + 1]
                return index + 1, True
        self.answers[row.request.id] += answer
        return len(answer), False


def check_positions(requests: Sequence[DecodeRequest], block_length: int, limit: int) -> None:
    """Refuse requests whose padded length passes the model's positions (generate and evaluate; U12)."""
    problems = [
        check_length(len(request.prompt), request.new_tokens, block_length, limit, f"request {request.id}")
        for request in requests
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError(found)
