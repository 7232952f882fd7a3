"""Accuracy, forwards and speed of block schedulers and caches on lists of questions, cell by cell of a plan.

All cells of a task see the same samples, decoded in batches of ragged rows. Responses are decoded whole, as the DSB
article does; figures ``_before_eos`` count until the answer is final, which is what an engine that stops there runs.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from herald_exec.bidirectional import decode, make_batch
from herald_exec.bidirectional.bench import row_seconds, rows_statistics
from herald_exec.bidirectional.tune import loss_probability
from herald_exec.evaluation.decoding_plan import TASKS, Cell, Plan, check_plan
from herald_exec.evaluation.resuming import read_done, weights_digest
from herald_exec.models.base import BlockModel
from herald_exec.reference.lists import ListSample, draw_list, score_list
from herald_exec.reference.scoring import wilson_interval
from herald_exec.reference.tasks import Material
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import ConfigError

ALPHA = 0.05
RAW = (
    *("seed", "answer", "right", "partial", "seconds", "nfe", "nfe_before_eos", "delivered_tokens"),
    *("forwarded_positions", "refreshes", "late_ratio_before_eos", "premature_ratio_before_eos"),
)
"""What a results file keeps of a sample; the other counts stand in the cell's figures."""
_SUMS = (
    *("forwarded_positions", "active_positions", "window_positions", "refresh_positions", "reused_positions"),
    "refreshes",
)
_MAX_DRAWS = 10_000


def draw_task(material: Material, plan: Plan, task: str, fits: int, count: int) -> list[ListSample]:
    """The first ``count`` lists from the plan's seed on that have the task's number of questions.

    Raises
    ------
    ConfigError
        Too few lists of that many questions fit the response.
    """
    fewest, most = TASKS[task]
    found: list[ListSample] = []
    for seed in range(plan.first_seed, plan.first_seed + _MAX_DRAWS):
        sample = draw_list(material, plan.prompt_tokens, fits, seed)
        if fewest <= len(sample.questions) <= most:
            found.append(sample)
        if len(found) == count:
            return found
    message = (
        f"only {len(found)} of {_MAX_DRAWS} lists have {fewest} to {most} questions in {fits} tokens; ask for less"
    )
    raise ConfigError(message)


def newline_tokens(material: Material, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a line: AdaBlock's delimiters."""
    return tuple(token for token in range(vocab_size) if material.encoder.decode([token]).endswith("\n"))


def mean_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean with its 95% normal interval; no interval from a single value."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return {"value": mean, "low": None, "high": None}
    half = 1.96 * math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1) / count)
    return {"value": mean, "low": mean - half, "high": mean + half}


@dataclass(frozen=True)
class Bench:
    """A model and what its answers are read with."""

    model: BlockModel
    material: Material
    plan: Plan
    batch: int

    def run(self, cell: Cell, samples: Sequence[ListSample], delimiters: tuple[int, ...]) -> list[dict[str, Any]]:
        """One row a sample: the answer, its scores and counts."""
        shape, policy = self.model.shape, cell.policy(self.plan.threshold)
        rows: list[dict[str, Any]] = []
        for first in range(0, len(samples), self.batch):
            part = samples[first : first + self.batch]
            batch = make_batch(shape, [sample.prompt for sample in part], cell.response, device=self.model.device)
            decoded = decode(
                self.model,
                batch,
                policy,
                Sampler(mask_token_id=shape.mask_token_id),
                diagnose=cell.diagnose,
                threshold=self.plan.threshold,
                delimiters=delimiters,
            )
            seconds, statistics = row_seconds(decoded), rows_statistics(decoded)
            for row, sample in enumerate(part):
                answer = [token for token in decoded.response(row) if token not in shape.eos_token_ids]
                text = self.material.encoder.decode(answer)
                scores = score_list(sample, text)
                rows.append(
                    {
                        "seed": sample.seed,
                        "answer": text,
                        "right": [int(score.exact) for score in scores],
                        "partial": [score.partial for score in scores],
                        "seconds": round(float(seconds[row]), 6),
                        **{
                            name: value
                            for name, value in statistics[row].items()
                            if name not in ("commits", "ends", "commits_per_round")
                        },
                    }
                )
        return rows


def _ratio(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None] | None:
    """Mean over samples of a share of rounds; samples without a round to count are left out."""
    known = [row[name] for row in rows if row[name] is not None]
    return mean_interval(known) if known else None


def summarise_cell(cell: Cell, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A cell's figures: proportions with Wilson intervals, means of samples with normal ones."""
    answers = [right for row in rows for right in row["right"]]
    seconds, delivered = sum(row["seconds"] for row in rows), sum(row["delivered_tokens"] for row in rows)
    nfe = sum(row["nfe"] for row in rows)
    return {
        "samples": len(rows),
        "answers": len(answers),
        "accuracy": wilson_interval(sum(answers), len(answers))._asdict(),
        "all_right": wilson_interval(sum(all(row["right"]) for row in rows), len(rows))._asdict(),
        "nfe": mean_interval([row["nfe"] for row in rows]),
        "nfe_before_eos": mean_interval([row["nfe_before_eos"] for row in rows]),
        "delivered_tokens": delivered,
        "tokens_per_forward_before_eos": delivered / sum(row["nfe_before_eos"] for row in rows),
        "mean_active_length": sum(row["mean_active_length"] * row["nfe"] for row in rows) / nfe,
        "positions_per_forward": sum(row["forwarded_positions"] for row in rows) / nfe,
        **{name: sum(row[name] for row in rows) for name in _SUMS},
        "late_ratio": _ratio(rows, "late_ratio"),
        "premature_ratio": _ratio(rows, "premature_ratio"),
        "late_ratio_before_eos": _ratio(rows, "late_ratio_before_eos"),
        "premature_ratio_before_eos": _ratio(rows, "premature_ratio_before_eos"),
        "seconds": None if cell.diagnose else seconds,
        "throughput_tok_s": None if cell.diagnose else delivered / seconds,
    }


def compare(row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """A cell against its base, sample by sample, and what it loses.

    ``marks``: ``accuracy`` where the one-sided exact sign test over samples (those with fewer right answers against
    those with more) is below :data:`ALPHA`; ``nfe`` and ``tok/s`` where the mean is worse at all. About one cell in
    twenty is marked ``accuracy`` by chance.
    """
    pairs = list(zip(row["raw"], base["raw"], strict=False))
    losses = sum(sum(a["right"]) < sum(b["right"]) for a, b in pairs)
    gains = sum(sum(a["right"]) > sum(b["right"]) for a, b in pairs)
    probability = loss_probability(losses, gains)
    forwards = (sum(side[index]["nfe"] for side in pairs) for index in (0, 1))
    own, others = forwards
    marks = ["accuracy"] if probability < ALPHA else []
    marks += ["nfe"] if own > others else []
    speed, base_speed = row["throughput_tok_s"], base["throughput_tok_s"]
    marks += ["tok/s"] if speed is not None and speed < base_speed else []
    return {
        "samples_lost": losses,
        "samples_gained": gains,
        "p_loss": probability,
        "nfe_of_base": own / others,
        "speed_of_base": None if speed is None else speed / base_speed,
        "marks": marks,
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def run_plan(
    model: BlockModel,
    material: Material,
    plan: Plan,
    *,
    batch: int,
    part: tuple[int, int] = (1, 1),
    out: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Every cell of a plan (or of a part of it) in order, with its raw answers; ``out``'s cells are not run again.

    ``out`` gets one JSON line a cell, each written as the cell ends.
    """
    check_plan(plan)
    facts = {
        "plan": f"{plan.name} {plan.fingerprint}",
        "model": model.shape.name,
        "weights": weights_digest(model),
        "device": model.device.type,
        "device_name": device_name(model.device),
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch": batch,
    }
    done = read_done(out, facts, lambda row: Cell(**row["cell"]), "a decoding run") if out is not None else {}
    bench = Bench(model, material, plan, batch)
    delimiters = newline_tokens(material, model.shape.vocab_size)
    samples: dict[tuple[str, int], list[ListSample]] = {}
    warm = False
    for cell, groups in plan.part(*part):
        if cell not in done:
            key = (cell.task, cell.fits)
            if key not in samples:
                samples[key] = draw_task(material, plan, *key, max(plan.samples, plan.ratio_samples))
            if not warm:
                # First calls are slow; the time must fall on no cell. A GPU's depend on how much is asked of it.
                few = samples[key][: batch if model.device.type == "cuda" else 1]
                bench.run(Cell(response=cell.fits, fits=cell.fits), few, delimiters)
                warm = True
            count = plan.ratio_samples if cell.diagnose else plan.samples
            rows = bench.run(cell, samples[key][:count], delimiters)
            raw = [{name: row[name] for name in RAW if row[name] is not None} for row in rows]
            row = {**facts, "groups": list(groups), "cell": asdict(cell), **summarise_cell(cell, rows), "raw": raw}
            row["against_base"] = compare(row, row if cell == cell.base else done[cell.base])
            done[cell] = row
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        yield done[cell]
