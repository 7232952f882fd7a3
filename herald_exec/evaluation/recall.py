"""How much of the best selection each rule finds: recall per layer and KV head against the oracle of every step.

The model decodes densely. Beside each block's steps, the importance of every prefix position is taken for the queries
of each rule (attention, normalised over all that a query sees, summed over the queries and the G heads of a KV head).
The oracle of a step is the top k by the importance that the step's own queries give (paper section V, Figs. 7 and 9).

All sets are over positions before block n, in block n + 1: positions of block n are handled apart by every rule (always
kept, or unknown yet), so counting them would only blur the comparison.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from herald_exec.attention import attend
from herald_exec.evaluation.prompts import Prompts
from herald_exec.models.base import BlockModel
from herald_exec.reference.tasks import Sample
from herald_pipeline import published
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import Attention

RULES = ("mage", "draft", "omit", "representative", "herald", "random")
"""Queries that score the prefix for block n + 1, and what stands for block n while they do.

``mage``: all B [MASK] queries, block n complete. ``draft``, ``omit``: the same, block n drafted (argmax of its
first step), or left out. ``representative``: query B // 2 alone, block n complete. ``herald``: that one, n drafted.
"""

FACTORS = (
    *(1.0, 1.2, 1.4),
    published.number(exhibit="Fig 9", method="HERALD", metric="budget_factor_matching_MAGE"),
    *(2.0, 2.5, 4.0, 8.0),
)
"""Budgets of the rules, as multiples of the oracle's k; the last two for rules that need far more than the paper's."""


@dataclass
class _Forward:
    """Densely decoded rows of one prompt length: KV ``[layers, 2, R, kv, L, d]``."""

    model: BlockModel
    kv: Tensor

    def __call__(
        self, tokens: Tensor, start: int, *, hidden_block: int | None = None, keep: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Forward of ``tokens [R, n]`` at ``start``; their KV replaces what was there.

        Parameters
        ----------
        hidden_block
            First position of a block that these queries must not see.
        keep
            Return importance of positions before this one.

        Returns
        -------
        tuple
            Hidden states ``[R, n, H]``, and ``[layers, R, kv, keep]`` or ``None``.
        """
        model, (rows, count) = self.model, tokens.shape
        block, end = model.shape.block_length, start + count
        # A lone query at the block's centre sees the prefix and itself, not the places of its block before it.
        first = start // block * block
        places = torch.arange(end, device=tokens.device)
        seen = (places < first) | (places >= start)
        if hidden_block is not None:
            seen &= (places < hidden_block) | (places >= hidden_block + block)
        rotary = model.rotary(torch.arange(start, end, device=tokens.device).repeat(rows))
        hidden = model.embed(tokens.flatten())
        found = []
        for layer in range(model.shape.num_layers):
            q, k, v = model.project(layer, hidden, rotary)
            q = q.view(rows, count, *q.shape[1:])
            keys, values = self.kv[layer]
            keys[:, :, start:end] = k.view(rows, count, *k.shape[1:]).transpose(1, 2)
            values[:, :, start:end] = v.reshape(rows, count, *v.shape[1:]).transpose(1, 2)
            if keep is not None:
                found.append(importance(q, keys[:, :, :end], seen)[:, :, :keep])
            out = attend(q, keys[:, :, :end], values[:, :, :end], mask=seen[None, :].expand(count, -1))
            hidden = model.finish(layer, hidden, out.flatten(0, 1))
        return hidden.view(rows, count, -1), torch.stack(found) if found else None


def importance(q: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """``[R, kv, L]``: attention of ``q [R, n, heads, d]`` over ``keys [R, kv, L, d]``, summed over queries and group.

    ``seen [L]`` says which keys the queries may look at; the others get none.
    """
    rows, count, heads, dim = q.shape
    kv_heads = keys.shape[1]
    folded = q.view(rows, count, kv_heads, heads // kv_heads, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    scores = (folded.float() * dim**-0.5) @ keys.float().mT
    summed: Tensor = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).sum(dim=2)
    return summed


def overlap(selected: Tensor, oracle: Tensor, budgets: Sequence[int], k: int) -> Tensor:
    """Share of the oracle's top ``k`` that is in the rule's top b, for each b of ``budgets``.

    Both are importances ``[..., L]``; the result is ``[..., len(budgets)]``. Each is ranked once.
    """
    wanted = torch.zeros_like(oracle, dtype=torch.bool).scatter_(-1, oracle.topk(k, dim=-1).indices, True)
    ranked = selected.topk(max(budgets), dim=-1).indices
    hits = wanted.gather(-1, ranked).cumsum(dim=-1)
    found: Tensor = hits[..., torch.tensor(budgets, device=hits.device) - 1] / k
    return found


@dataclass
class _Scores:
    """Importances of the rules for one coming block, over positions before ``keep``."""

    keep: int
    rules: dict[str, Tensor] = field(default_factory=dict)


class RecallStudy:
    """Dense decoding of samples of one context, with recalls on the way.

    Parameters
    ----------
    budget
        k = floor(budget x S) with S the positions before block n.
    first_layer
        Layers before this one are exact in HERALD and not counted.
    """

    def __init__(
        self,
        model: BlockModel,
        samples: Sequence[Sample],
        *,
        budget: float = 0.05,
        threshold: float = 0.95,
        first_layer: int = 2,
        seed: int = 0,
    ) -> None:
        raise_problems(
            [
                check_number(budget, "budget", above=0, maximum=1 / max(FACTORS)),
                check_number(threshold, "threshold", minimum=0, maximum=1),
                check_number(first_layer, "first_layer", minimum=0, maximum=model.shape.num_layers - 1, integer=True),
            ]
        )
        if model.shape.attention is not Attention.BLOCK_CAUSAL:
            message = f"recall is about completed prefixes; {model.shape.name} is bidirectional and has none"
            raise ConfigError(message)
        if len({sample.context for sample in samples}) != 1:
            message = "recall: give samples of one context at a time"
            raise ConfigError(message)
        self.model, self.samples = model, samples
        self.budget, self.threshold, self.first_layer = budget, threshold, first_layer
        self._generator = torch.Generator(model.device).manual_seed(seed)

    @torch.inference_mode()
    def run(self, blocks: int) -> Iterator[dict[str, Any]]:
        """Rows ``{sample, block, step, rule, factor, recall, by_layer}`` for blocks 1 to ``blocks`` - 1."""
        shape, block = self.model.shape, self.model.shape.block_length
        prompts = torch.tensor([sample.prompt for sample in self.samples], device=self.model.device)
        rows, context = prompts.shape
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, context + (blocks + 1) * block, shape.head_dim)
        forward = _Forward(self.model, torch.zeros(size, dtype=self.model.kv_dtype, device=self.model.device))
        forward.kv[..., :context, :] = Prompts(self.model, self.samples).kv[..., :context, :]
        ended = torch.zeros(rows, dtype=torch.bool, device=self.model.device)
        coming: _Scores | None = None
        for number in range(blocks):
            start = context + number * block
            following = _Scores(start)
            tokens = torch.full((rows, block), shape.mask_token_id, device=self.model.device)
            masked = torch.ones_like(tokens, dtype=torch.bool)
            step = 0
            while bool(masked.any()):
                live = masked.any(dim=1) & ~ended
                hidden, oracle = forward(tokens, start, keep=None if coming is None else coming.keep)
                if coming is not None and oracle is not None:
                    yield from self._recalls(coming, oracle, live, number, step)
                chosen, sure = self._choose(hidden)
                if step == 0:
                    self._score_early(forward, following, chosen, start)
                sure = sure.masked_fill(~masked, -1.0)
                best = torch.arange(block, device=tokens.device) == sure.argmax(dim=1, keepdim=True)
                accepted = masked & ((sure >= self.threshold) | best)
                tokens = torch.where(accepted, chosen, tokens)
                masked = masked & ~accepted
                step += 1
            forward(tokens, start)
            self._score_late(forward, following, start)
            ended |= torch.isin(tokens, torch.tensor(shape.eos_token_ids, device=tokens.device)).any(dim=1)
            coming = following
            if bool(ended.all()):
                return

    def _choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probability = self.model.logits(hidden.flatten(0, 1)).float().softmax(dim=-1)
        probability[:, self.model.shape.mask_token_id] = 0.0
        sure, token = (part.view(hidden.shape[:2]) for part in probability.max(dim=-1))
        return token, sure

    def _masks(self, rows: int, count: int) -> Tensor:
        return torch.full((rows, count), self.model.shape.mask_token_id, device=self.model.device)

    def _score_early(self, forward: _Forward, scores: _Scores, draft: Tensor, start: int) -> None:
        """Rules that run beside block n: its draft stands for it, or nothing does."""
        block, rows = self.model.shape.block_length, draft.shape[0]
        forward(draft, start)
        scores.rules["draft"] = self._score(forward, rows, start, block, 0)
        scores.rules["herald"] = self._score(forward, rows, start, 1, block // 2)
        scores.rules["omit"] = self._score(forward, rows, start, block, 0, hidden_block=start)

    def _score_late(self, forward: _Forward, scores: _Scores, start: int) -> None:
        """Rules that wait for block n, and the control."""
        block, rows = self.model.shape.block_length, len(self.samples)
        scores.rules["mage"] = self._score(forward, rows, start, block, 0)
        scores.rules["representative"] = self._score(forward, rows, start, 1, block // 2)
        size = scores.rules["mage"].shape
        scores.rules["random"] = torch.rand(size, generator=self._generator, device=self.model.device)

    def _score(
        self, forward: _Forward, rows: int, start: int, queries: int, offset: int, hidden_block: int | None = None
    ) -> Tensor:
        """Importances for [MASK] queries of the block behind the one at ``start``."""
        place = start + self.model.shape.block_length + offset
        found = forward(self._masks(rows, queries), place, hidden_block=hidden_block, keep=start)[1]
        assert found is not None
        return found

    def _recalls(
        self, coming: _Scores, oracle: Tensor, live: Tensor, number: int, step: int
    ) -> Iterator[dict[str, Any]]:
        k = max(1, int(self.budget * coming.keep + 1e-9))
        running = live.nonzero()[:, 0].tolist()
        budgets = [min(coming.keep, round(factor * k)) for factor in FACTORS]
        for rule, scores in coming.rules.items():
            shares = overlap(scores[self.first_layer :], oracle[self.first_layer :], budgets, k)
            # [layers, R, factors], once to the host: a wait for the device for every row would take longer than the
            # decoding.
            by_layer = shares.mean(dim=2).cpu()
            means = by_layer.mean(dim=0).tolist()
            for row in running:
                sample = self.samples[row]
                for at, factor in enumerate(FACTORS):
                    yield {
                        "sample": sample.seed,
                        "task": sample.task,
                        "context": sample.context,
                        "block": number,
                        "step": step,
                        "rule": rule,
                        "factor": factor,
                        "recall": means[row][at],
                        "by_layer": [round(value, 4) for value in by_layer[:, row, at].tolist()],
                    }


def mean_recall(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], float]:
    """Mean over (block, step) of each rule and factor: Fig. 9."""
    groups: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        groups.setdefault((row["rule"], row["factor"]), []).append(row["recall"])
    return {key: sum(values) / len(values) for key, values in groups.items()}


def by_bucket(rows: Sequence[dict[str, Any]], edges: Sequence[float] = (0.5, 0.6, 0.7, 0.8)) -> list[dict[str, Any]]:
    """Recall with block n left out, drafted and completed, in buckets of the first: Fig. 7 (factor 1)."""
    pairs: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["factor"] == 1.0 and row["rule"] in ("omit", "draft", "mage"):
            key = (row["task"], row["context"], row["sample"], row["block"], row["step"])
            pairs.setdefault(key, {})[row["rule"]] = row["recall"]
    bounds = [0.0, *edges, 1.0 + 1e-9]
    found = []
    for low, high in itertools.pairwise(bounds):
        inside = [pair for pair in pairs.values() if low <= pair["omit"] < high]
        means = {rule: sum(pair[rule] for pair in inside) / len(inside) for rule in ("omit", "draft", "mage") if inside}
        found.append({"from": low, "to": min(high, 1.0), "pairs": len(inside)} | means)
    return found


def budget_factors(
    rows: Sequence[dict[str, Any]],
    rules: Sequence[str] = ("draft", "representative", "herald"),
    resamples: int = 1000,
    seed: int = 0,
    first_step: int = 0,
) -> list[dict[str, Any]]:
    """Factor of the budget at which each rule finds as much as MAGE does at factor 1, with its 95% interval (Fig. 9).

    Recall between measured factors is interpolated. Samples are resampled whole, because the steps of an answer are
    alike. ``None`` says that the largest factor measured does not suffice. At step 0 MAGE's queries are the oracle's,
    so its recall is 1 there by construction: ``first_step`` 1 leaves that out. Empty where no step is left.
    """
    rows = [row for row in rows if row["step"] >= first_step]
    if not rows:
        return []
    samples = sorted({(row["task"], row["context"], row["sample"]) for row in rows})
    number = {sample: at for at, sample in enumerate(samples)}
    factors = sorted({row["factor"] for row in rows})
    sums = {rule: np.zeros((len(samples), len(factors))) for rule in ("mage", *rules)}
    counts = np.zeros(len(samples))
    for row in rows:
        at = number[row["task"], row["context"], row["sample"]]
        if row["rule"] in sums:
            sums[row["rule"]][at, factors.index(row["factor"])] += row["recall"]
        counts[at] += row["rule"] == "mage" and row["factor"] == factors[0]
    picks = np.random.default_rng(seed).integers(0, len(samples), (resamples, len(samples)))
    weights = np.stack([np.bincount(pick, minlength=len(samples)) for pick in picks])
    found = []
    for rule in rules:
        values = [
            _crossing(
                factors, weight @ sums[rule] / (weight @ counts), float(weight @ sums["mage"][:, 0] / (weight @ counts))
            )
            for weight in (np.ones(len(samples)), *weights)
        ]
        low, high = np.quantile(values[1:], (0.025, 0.975), method="closest_observation")
        ends = {"value": values[0], "low": float(low), "high": float(high)}
        finite = {name: value if np.isfinite(value) else None for name, value in ends.items()}
        found.append({"rule": rule, "first_step": first_step, "samples": len(samples)} | finite)
    return found


def _crossing(factors: Sequence[float], recalls: Any, target: float) -> float:
    """Smallest factor whose recall reaches ``target``, infinite if none does."""
    above = np.flatnonzero(recalls >= target)
    if not len(above):
        return float("inf")
    at = int(above[0])
    if at == 0:
        return factors[0]
    share = (target - recalls[at - 1]) / (recalls[at] - recalls[at - 1])
    return float(factors[at - 1] + share * (factors[at] - factors[at - 1]))
