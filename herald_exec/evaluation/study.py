"""Accuracy of selection rules on the reference model's tasks, many prompts at once, on any device.

Prompts of one length are prefilled once; every rule then decodes from the same KV. What a rule reads, and when, is the
executor's (DESIGN section 5); where the entries lie and when they move is left out, so that a cell takes a second on a
GPU. A test holds answers and steps against the executor's, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.evaluation.prompts import Prompts
from herald_exec.evaluation.rules import Previous, Rule, When
from herald_exec.evaluation.scoring import select
from herald_exec.models.layers import Rotary
from herald_exec.pools import KV
from herald_exec.prefill import importance, top_positions
from herald_exec.proxies import proxy_importance, speculated_queries
from herald_pipeline.decoding import acceptance
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.settings import Settings


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers cut before their end token, T of each block, and what selections read, by request.

    ``scan_bytes`` and ``selections`` leave prefill's selection out, which needs no stored entry.
    """

    answers: list[list[int]]
    steps: list[list[int]]
    scan_bytes: list[float]
    selections: list[int]


@dataclass
class Lanes:
    """Queries at ``positions [R, n]`` and the angles of them all, as a pass through the layers needs them."""

    positions: Tensor
    rotary: Rotary


class Study:
    """One rule at one budget over :class:`Prompts`.

    Parameters
    ----------
    budget
        k = floor(budget x S), S as DESIGN section 5 says; not used by Dense.
    seed
        Of the random control.
    """

    def __init__(self, prompts: Prompts, rule: Rule, budget: float, *, threshold: float = 0.95, seed: int = 0) -> None:
        self.prompts, self.rule, self.model = prompts, rule, prompts.model
        self.settings = Settings(budget=budget)
        self._accept = acceptance.get("confidence", threshold=threshold)
        self._sampler = Sampler(mask_token_id=self.model.shape.mask_token_id)
        self._generator = torch.Generator(self.model.device).manual_seed(seed)
        self.block = self.model.shape.block_length
        self._rows = torch.arange(len(prompts.samples), device=self.model.device)
        self._pools: dict[int, KV] = {}
        self._bytes = [0.0] * len(prompts.samples)
        self._selections = [0] * len(prompts.samples)

    # The decoding loop ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self) -> Answered:
        """Decode every prompt to its end token or its task's longest answer."""
        number, context = len(self.prompts.samples), self.prompts.context
        answers: list[list[int]] = [[] for _ in range(number)]
        steps: list[list[int]] = [[] for _ in range(number)]
        self._fill_first()
        for start in range(context, context + self.prompts.longest, self.block):
            tokens, taken, draft = self._decode_block(start)
            going = []
            for lane, row in enumerate(self._rows.tolist()):
                said = tokens[lane].tolist()
                end = next((at for at, token in enumerate(said) if token in self.model.shape.eos_token_ids), None)
                answers[row] += said[:end]
                steps[row].append(taken[lane])
                if end is None:
                    going.append(lane)
            last = start + 2 * self.block > context + self.prompts.longest
            if not going or last:
                break
            self._next_block(torch.tensor(going, device=self.model.device), draft, start)
        return Answered(answers, steps, self._bytes, self._selections)

    def _decode_block(self, start: int) -> tuple[Tensor, list[int], list[KV] | None]:
        """Tokens ``[R, B]``, steps of each row, and the draft's KV by layer; clean KV is left in the prompts' cache."""
        model, number = self.model, len(self._rows)
        tokens = torch.full((number, self.block), model.shape.mask_token_id, device=model.device)
        masked = torch.ones_like(tokens, dtype=torch.bool)
        taken = torch.zeros(number, dtype=torch.int64, device=model.device)
        draft = None
        step = 0
        while bool(masked.any()):
            live = masked.any(dim=1).nonzero()[:, 0]
            if step == 0 and self.rule.when in (When.STEP0, When.PROXY):
                hidden = self._selecting_step(tokens, start)
            else:
                hidden = self._forward(tokens[live], start, live)[0]
            choice = self._sampler(
                model.logits(hidden).float() if model.dtype != torch.float32 else model.logits(hidden)
            )
            token, sure = (part.view(len(live), self.block) for part in (choice.token, choice.confidence))
            accepted = self._accept(sure, masked[live], step=taken[live], steps=32, entropy=None)
            tokens[live] = torch.where(accepted, token, tokens[live])
            masked[live] = masked[live] & ~accepted
            taken[live] += 1
            if step == 0 and self.rule.when is When.AHEAD and self.rule.previous is Previous.DRAFT:
                draft = self._forward(torch.where(masked, token, tokens), start, None)[1]
            step += 1
        self._store(self._forward(tokens, start, None)[1], start)
        return tokens, taken.tolist(), draft

    def _store(self, clean: Sequence[KV], start: int) -> None:
        for layer, kv in enumerate(clean):
            for part, values in enumerate(kv):
                self.prompts.kv[layer, part, self._rows, :, start : start + self.block] = values

    # Forwards ---------------------------------------------------------------------------------------------------------

    def _lanes(self, rows: int, start: int, count: int) -> Lanes:
        positions = torch.arange(start, start + count, device=self.model.device).expand(rows, -1)
        return Lanes(positions, self.model.rotary(positions.flatten()))

    def _full(self, layer: int, end: int, lanes: Tensor | None = None) -> KV:
        """Everything before ``end`` of the running rows, or of some of them; a view where all are running."""
        rows = self._rows if lanes is None else self._rows[lanes]
        stored = self.prompts.kv[layer, :, :, :, :end]
        if len(rows) == len(self.prompts.samples):
            return KV(stored[0], stored[1])
        return KV(stored[0, rows], stored[1, rows])

    def _prefix(self, layer: int, start: int, lanes: Tensor | None) -> KV:
        """What a step of the block at ``start`` reads besides itself."""
        if layer not in self._pools:
            return self._full(layer, start, lanes)
        pool = self._pools[layer]
        return pool if lanes is None else KV(pool.keys[lanes], pool.values[lanes])

    def _layers(
        self, tokens: Tensor, start: int, attention: Callable[[int, Tensor, KV, Tensor, Lanes], Tensor]
    ) -> Tensor:
        """Hidden states ``[R * n, H]`` of ``tokens [R, n]``; ``attention`` gets layer, Q, own KV, the layer's input."""
        model, (rows, count) = self.model, tokens.shape
        lanes = self._lanes(rows, start, count)
        hidden = model.embed(tokens.flatten())
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, lanes.rotary)
            own = KV(*(part.reshape(rows, count, *part.shape[1:]).transpose(1, 2) for part in (k, v)))
            out = attention(layer, q.view(rows, count, *q.shape[1:]), own, hidden, lanes)
            hidden = model.finish(layer, hidden, out.flatten(0, 1))
        return hidden

    def _forward(self, tokens: Tensor, start: int, live: Tensor | None) -> tuple[Tensor, list[KV]]:
        """A step of the block over what it may read; hidden states, and the tokens' own KV by layer."""
        kept: list[KV] = []
        some = None if live is None or len(live) == len(self._rows) else live

        def attention(layer: int, q: Tensor, own: KV, _hidden: Tensor, _lanes: Lanes) -> Tensor:
            kept.append(own)
            return _attend(q, self._prefix(layer, start, some), own)

        return self._layers(tokens, start, attention), kept

    def _selecting_step(self, tokens: Tensor, start: int) -> Tensor:
        """Step 0 that selects on its way: dense for MAGE, over what the proxy picked for InfiniGen."""
        self._pools.clear()
        count = self.settings.selected_tokens(start)
        self._count_bytes(start, count)
        previous: list[Tensor] = []

        def attention(layer: int, q: Tensor, own: KV, hidden: Tensor, lanes: Lanes) -> Tensor:
            full = self._full(layer, start)
            if self.rule.when is When.STEP0:
                self._pools[layer] = _gathered(full, top_positions(importance(q, full, own), count))
                return _attend(q, full, own)
            source = previous[-1] if previous else hidden
            previous.append(hidden)
            asked = speculated_queries(self.model, layer, lanes, source)
            self._pools[layer] = _gathered(full, self._proxy_pick(layer, asked, full.keys, count))
            return _attend(q, self._pools[layer], own)

        return self._layers(tokens, start, attention)

    def _proxy_pick(self, layer: int, queries: Tensor, keys: Tensor, count: int) -> Tensor:
        """InfiniGen's entries: speculated queries over partial keys."""
        columns = self.prompts.columns[layer][self._rows]
        return top_positions(proxy_importance(queries, keys @ columns, columns), count)

    # Selection of the coming block ------------------------------------------------------------------------------------

    def _fill_first(self) -> None:
        """Block 0 of an overlapped rule is selected for by its B queries in prefill; controls choose as ever."""
        context = self.prompts.context
        if self.rule.when is When.AHEAD:
            masks = torch.full((len(self._rows), self.block), self.model.shape.mask_token_id, device=self.model.device)
            count = self.settings.selected_tokens(context)

            def attention(layer: int, q: Tensor, own: KV, _hidden: Tensor, _lanes: Lanes) -> Tensor:
                full = self._full(layer, context)
                if layer >= self.rule.exact_layers:
                    self._pools[layer] = _gathered(full, top_positions(importance(q, full, own), count))
                return _attend(q, full, own)

            self._layers(masks, context, attention)
        elif self.rule.when in (When.RECENT, When.RANDOM):
            self._control(context)

    def _next_block(self, going: Tensor, draft: list[KV] | None, start: int) -> None:
        """Drop rows that ended, and choose what the block behind the one at ``start`` reads."""
        if self.rule.when is When.AHEAD:
            self._rows = self._rows[going]
            drafted = None if draft is None else [KV(kv.keys[going], kv.values[going]) for kv in draft]
            self._ahead(drafted, start)
        else:
            self._rows = self._rows[going]
            self._pools.clear()
            if self.rule.when in (When.RECENT, When.RANDOM):
                self._control(start)
        tail = start + self.block
        if self.rule.when in (When.AHEAD, When.RECENT, When.RANDOM):
            for layer, pool in self._pools.items():
                last = self._full(layer, tail)
                clean = (part[:, :, start:tail] for part in last)
                self._pools[layer] = KV(*(torch.cat(pair, dim=2) for pair in zip(pool, clean, strict=True)))

    def _control(self, seen: int) -> None:
        """Entries before ``seen`` by place or by lot."""
        shape, count = self.model.shape, self.settings.selected_tokens(seen)
        for layer in range(self.rule.exact_layers, shape.num_layers):
            full = self._full(layer, seen)
            if self.rule.when is When.RECENT:
                positions = torch.arange(seen - count, seen, device=self.model.device)
                picked = positions.expand(len(self._rows), shape.num_kv_heads, -1)
            else:
                size = (len(self._rows), shape.num_kv_heads, seen)
                picked = top_positions(torch.rand(size, generator=self._generator, device=self.model.device), count)
            self._pools[layer] = _gathered(full, picked)

    def _ahead(self, draft: list[KV] | None, start: int) -> None:
        """[MASK] queries of the coming block over the prefix before ``start`` and what stands for the block there."""
        queries = self.rule.queries
        self._count_bytes(start, self.settings.selected_tokens(start))
        self._ask(draft, start, queries, start + self.block + self.block // 2 - queries // 2)

    def _ask(self, draft: list[KV] | None, start: int, queries: int, first: int) -> None:
        """``queries`` [MASK] tokens from position ``first`` on fill the pools with entries before ``start``.

        They also see ``draft``, or the clean block at ``start`` where the rule says that it is complete.
        """
        rule, count, self._pools = self.rule, self.settings.selected_tokens(start), {}
        masks = torch.full((len(self._rows), queries), self.model.shape.mask_token_id, device=self.model.device)

        def attention(layer: int, q: Tensor, own: KV, _hidden: Tensor, _lanes: Lanes) -> Tensor:
            extra = None if draft is None else draft[layer]
            if rule.previous is Previous.COMPLETE:
                full = self._full(layer, start + self.block)
                extra = KV(full.keys[:, :, start:], full.values[:, :, start:])
            prefix = self._full(layer, start)
            scored = select(q, prefix, extra, own, rule, count if layer >= rule.exact_layers else 0)
            if scored.picked is not None:
                self._pools[layer] = _gathered(prefix, scored.picked)
            return scored.output

        self._layers(masks, first, attention)

    def _count_bytes(self, prefix: int, count: int) -> None:
        read = self.rule.scan_bytes(self.model.shape, prefix, count)
        for row in self._rows.tolist():
            self._bytes[row] += read
            self._selections[row] += 1


def _attend(q: Tensor, prefix: KV, own: KV) -> Tensor:
    keys, values = (torch.cat(pair, dim=2) for pair in zip(prefix, own, strict=True))
    return attend(q, keys, values)


def _gathered(full: KV, picked: Tensor) -> KV:
    index = picked[..., None].expand(-1, -1, -1, full.keys.shape[-1])
    return KV(full.keys.gather(2, index), full.values.gather(2, index))
