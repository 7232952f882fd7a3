"""A window that slides over HERALD's pools, on many prompts at once: what method ``herald-sliding`` decodes.

The rules of :mod:`herald_exec.evaluation.study` under another schedule. A *period* is R committed tokens, the window
the W positions from its start on. It slides by R when its R leftmost positions are committed; tokens may be committed
in all of it. Whatever a rule selects it selects once a period, over the prefix that was complete when the period began,
and the period itself stands in the pool's tail. With R = W = B this is the block decoder, token for token; with rule
``dense`` nothing is selected, so that what is lost is the schedule's. A test holds the executor's tokens against it.

Which positions see which is in :mod:`herald_exec.windows`; ``Slide.clean`` and ``Slide.sight`` are the other readings
of a slid window, measured beside it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.rules import Previous, Rule, When
from herald_exec.evaluation.study import Answered, Lanes, Study
from herald_exec.pools import KV
from herald_exec.prefill import importance, top_positions
from herald_exec.windows import beside_a_sure_one, window_mask
from herald_pipeline.decoding.sampling import Choice
from herald_pipeline.errors import ConfigError, check_number, raise_problems

CLEAN = ("alone", "window")
SIGHT = ("block", "stride")


@dataclass(frozen=True, slots=True)
class Slide:
    """R and W, and how a window is read.

    Attributes
    ----------
    stride
        R, committed tokens between two slides (and two retrievals).
    window
        W, positions of a forward; a multiple of R.
    clean
        What a period's tokens see in the forward that makes their clean KV: ``alone``, themselves (the method's), or
        ``window``, the masks right of them too.
    sight
        Blocks within the window: ``block``, the model's B (the method's), or ``stride``, R.
    """

    stride: int
    window: int
    clean: str = "alone"
    sight: str = "block"

    def __post_init__(self) -> None:
        problems = [
            check_number(self.stride, "stride", minimum=1, integer=True),
            check_number(self.window, "window", minimum=1, integer=True),
        ]
        if not any(problems) and self.window % self.stride:
            problems.append(f"window must be a multiple of the stride, got {self.window} and {self.stride}")
        problems += [
            f"{name} must be {' or '.join(known)}, got {value!r}"
            for name, value, known in (("clean", self.clean, CLEAN), ("sight", self.sight, SIGHT))
            if value not in known
        ]
        raise_problems(problems)

    @property
    def name(self) -> str:
        """``8/32``, and the reading where it is not the method's."""
        reading = [] if self.clean == "alone" else [f"clean={self.clean}"]
        reading += [] if self.sight == "block" else [f"sight={self.sight}"]
        return " ".join([f"{self.stride}/{self.window}", *reading])


@dataclass(frozen=True, slots=True)
class Slid(Answered):
    """:class:`Answered` with ``steps`` by period, and by request the periods that were complete before their step."""

    ahead: list[int] = field(default_factory=list)


class Sliding(Study):
    """One rule at one budget under one :class:`Slide`.

    A period takes one step at least, as the executor's program issues it: a window that was committed that far is not
    forced to take more in it. A rule of 32 queries or more asks with all W of the next window.
    """

    def __init__(
        self, prompts: Prompts, rule: Rule, budget: float, slide: Slide, *, threshold: float = 0.95, seed: int = 0
    ) -> None:
        super().__init__(prompts, rule, budget, threshold=threshold, seed=seed)
        if rule.when in (When.STEP0, When.PROXY):
            message = f"{rule.name} selects in a block's own first step; a window slides over pools filled ahead"
            raise ConfigError(message)
        trained = self.block
        if trained % slide.stride and slide.stride % trained:
            message = f"stride {slide.stride} does not divide the model's block of {trained}"
            raise ConfigError(message)
        self.slide, self.block = slide, slide.stride
        group = slide.stride if slide.sight == "stride" else trained
        cut = slide.stride if slide.clean == "alone" else None
        device = self.model.device
        self._step_mask = window_mask(slide.window, group, device=device)
        self._clean_mask = window_mask(slide.window, group, cut, device=device)
        size = (len(prompts.samples), slide.window)
        self._tokens = torch.full(size, self.model.shape.mask_token_id, device=device)
        self._masked = torch.ones_like(self._tokens, dtype=torch.bool)

    @property
    def queries(self) -> int:
        """x: as the rule says, or all of the next window."""
        return self.slide.window if self.rule.queries >= 32 else self.rule.queries

    @property
    def draft_tokens(self) -> int:
        """Drafted positions that a selection reads: those before its first query, which stands for the others."""
        window = self.slide.window
        return min(window, self.block + window // 2 - self.queries // 2)

    @torch.inference_mode()
    def run(self) -> Slid:
        """Decode every prompt to its end token or its task's longest answer."""
        number, context = len(self.prompts.samples), self.prompts.context
        answers: list[list[int]] = [[] for _ in range(number)]
        steps: list[list[int]] = [[] for _ in range(number)]
        ahead = [0] * number
        self._fill_first()
        end = context + self.prompts.longest
        for start in range(context, end, self.block):
            early = (~self._masked[:, : self.block].any(dim=1)).tolist()
            taken, draft = self._decode_period(start)
            said, going = self._tokens[:, : self.block].tolist(), []
            for lane, row in enumerate(self._rows.tolist()):
                stop = next((i for i, token in enumerate(said[lane]) if token in self.model.shape.eos_token_ids), None)
                answers[row] += said[lane][:stop]
                steps[row].append(taken[lane])
                ahead[row] += early[lane]
                if stop is None:
                    going.append(lane)
            if not going or start + self.block >= end:
                break
            kept = torch.tensor(going, device=self.model.device)
            self._slide(kept)
            self._next_block(kept, draft, start)
        return Slid(answers, steps, self._bytes, self._selections, ahead)

    def _decode_period(self, start: int) -> tuple[list[int], list[KV] | None]:
        """Steps of each row and the draft's KV by layer; the period's clean KV is left in the prompts' cache."""
        period, drafts = self.block, self.rule.when is When.AHEAD and self.rule.previous is Previous.DRAFT
        open_ = self._masked[:, :period].any(dim=1)
        taken = torch.zeros(len(self._rows), dtype=torch.int64, device=self.model.device)
        draft: list[KV] | None = None
        live = torch.arange(len(self._rows), device=self.model.device)
        while len(live):
            token = self._commit(live, self._window(self._tokens[live], start, live, self._step_mask)[0], open_[live])
            if drafts and draft is None:
                drafted = torch.where(self._masked, token, self._tokens)
                draft = self._window(drafted, start, None, self._clean_mask)[1]
            taken[live] += 1
            open_ = self._masked[:, :period].any(dim=1)
            live = open_.nonzero()[:, 0]
        everyone = torch.arange(len(self._rows), device=self.model.device)
        hidden, clean = self._window(self._tokens, start, None, self._clean_mask)
        self._store([KV(*(part[:, :, :period] for part in kv)) for kv in clean], start)
        if draft is not None:
            # A row that was complete after its first step drafts in this very forward.
            at_once = (taken == 1)[:, None, None, None]
            pairs = zip(clean, draft, strict=True)
            draft = [KV(*(torch.where(at_once, *both) for both in zip(*kv, strict=True))) for kv in pairs]
        if self.slide.window > period:
            self._commit(everyone, hidden, torch.zeros_like(open_))
        return taken.tolist(), draft

    def _commit(self, live: Tensor, hidden: Tensor, forced: Tensor) -> Tensor:
        """Accept what is sure in the windows of ``live`` rows, where ``forced`` the best at least; the best tokens."""
        logits = self.model.logits(hidden)
        choice = self._sampler(logits if self.model.dtype == torch.float32 else logits.float())
        shape = (len(live), self.slide.window)
        found = Choice(choice.token.view(shape), choice.confidence.view(shape), None)
        masked = self._masked[live]
        accepted = self._accept(found.confidence, masked, step=0, steps=32, entropy=None)
        wide, more = beside_a_sure_one(found, masked)
        sure = self._accept(wide.confidence, more, step=0, steps=32, entropy=None)[:, :-1]
        accepted = torch.where(forced[:, None], accepted, sure)
        self._tokens[live] = torch.where(accepted, found.token, self._tokens[live])
        self._masked[live] = masked & ~accepted
        tokens: Tensor = found.token
        return tokens

    def _slide(self, going: Tensor) -> None:
        tokens, masked = self._tokens[going, self.block :], self._masked[going, self.block :]
        fresh = tokens.new_full((len(going), self.block), self.model.shape.mask_token_id)
        self._tokens = torch.cat([tokens, fresh], dim=1)
        self._masked = torch.cat([masked, torch.ones_like(fresh, dtype=torch.bool)], dim=1)

    # Forwards and selection -------------------------------------------------------------------------------------------

    def _window(self, tokens: Tensor, start: int, live: Tensor | None, seen: Tensor | None) -> tuple[Tensor, list[KV]]:
        """A forward of windows at ``start``; ``seen`` says what their positions see of one another."""
        kept: list[KV] = []
        some = None if live is None or len(live) == len(self._rows) else live

        def attention(layer: int, q: Tensor, own: KV, _hidden: Tensor, _lanes: Lanes) -> Tensor:
            kept.append(own)
            return _attend(q, self._prefix(layer, start, some), own, seen)

        return self._layers(tokens, start, attention), kept

    def _fill_first(self) -> None:
        """The first window is selected for by its W queries in prefill."""
        if self.rule.when is not When.AHEAD:
            super()._fill_first()
            return
        context, count = self.prompts.context, self.settings.selected_tokens(self.prompts.context)

        def attention(layer: int, q: Tensor, own: KV, _hidden: Tensor, _lanes: Lanes) -> Tensor:
            full = self._full(layer, context)
            if layer >= self.rule.exact_layers:
                self._pools[layer] = _gathered(full, top_positions(importance(q, full, own), count))
            return _attend(q, full, own, self._step_mask)

        self._layers(self._tokens, context, attention)

    def _ahead(self, draft: list[KV] | None, start: int) -> None:
        """[MASK] queries of the next window over the prefix before ``start`` and what is drafted before them."""
        length, queries = self.draft_tokens, self.queries
        stands = {Previous.DRAFT: length, Previous.OMITTED: 0, Previous.COMPLETE: self.block}
        self._count(start, self.settings.selected_tokens(start), stands[self.rule.previous])
        seen = None if draft is None else [KV(*(part[:, :, :length] for part in kv)) for kv in draft]
        self._ask(seen, start, queries, start + self.block + self.slide.window // 2 - queries // 2)

    def _count(self, prefix: int, count: int, draft: int) -> None:
        read = self.rule.scan_bytes(self.model.shape, prefix, count, draft)
        for row in self._rows.tolist():
            self._bytes[row] += read
            self._selections[row] += 1


def _gathered(full: KV, picked: Tensor) -> KV:
    index = picked[..., None].expand(-1, -1, -1, full.keys.shape[-1])
    return KV(full.keys.gather(2, index), full.values.gather(2, index))


def _attend(q: Tensor, prefix: KV, own: KV, seen: Tensor | None) -> Tensor:
    """Attention to all of the prefix and to what ``seen [W, W]`` allows of the window."""
    keys, values = (torch.cat(pair, dim=2) for pair in zip(prefix, own, strict=True))
    if seen is not None:
        everything = seen.new_ones(len(seen), prefix.keys.shape[2])
        seen = torch.cat([everything, seen], dim=1)
    return attend(q, keys, values, mask=seen)
