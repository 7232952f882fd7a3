"""The training loop: resumable, with a loss curve, checkpoints on the way and an evaluation at the end."""

import csv
import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.checkpoints.writing import write_checkpoint
from herald_exec.models.base import BlockModel
from herald_exec.reference.documents import ANSWER
from herald_exec.reference.evaluate import grid
from herald_exec.reference.feed import Batch, Feed
from herald_exec.reference.network import Network, dense_training_mask, flex_mask
from herald_exec.reference.noise import block_masks, kind_weights, response_mask
from herald_exec.reference.optimiser import Optimiser
from herald_exec.reference.prepare import HELD_OUT_FILE, TRAIN_FILE, VOCABULARY_FILES
from herald_exec.reference.recipe import BatchPlan, Recipe, check_material
from herald_exec.reference.tasks import TASKS, read_material
from herald_pipeline.errors import ConfigError

SHARD_BYTES = 12_000_000
CHECKPOINT_AT = (0.5, 0.7, 0.85)
SHIPPED_FILES = (*VOCABULARY_FILES, HELD_OUT_FILE)
_LOG_EVERY = 20
_CURVE = ("step", "progress", "seconds", "tokens", "kind", "length", "rate", "loss", "answer_loss", "blank_answer_loss")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a run may be told beside its recipe.

    Attributes
    ----------
    data, out, state
        Folder of ``generate-data``; folder of the checkpoint; file to resume from, written with every checkpoint.
    start
        Checkpoint folder whose weights training begins with; drawn from the seed otherwise.
    time_limit_s
        Training ends by then, all schedules stretched to fit; without it ``recipe.steps`` decide.
    evaluate_s
        Longest evaluation after training; 0 skips it.
    """

    data: Path
    out: Path
    state: Path
    device: str = "cpu"
    seed: int = 0
    workers: int = 1
    time_limit_s: float | None = None
    evaluate_s: float = 60.0
    evaluate_samples: int = 64
    resume: bool = False
    start: Path | None = None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Trainer:
    """State of a run between steps."""

    def __init__(self, recipe: Recipe, options: TrainOptions) -> None:
        self.recipe, self.options = recipe, options
        self.device = torch.device(options.device)
        cuda = self.device.type == "cuda"
        self.network = Network(recipe.shape, options.seed, torch.bfloat16 if cuda else torch.float32).to(self.device)
        self.optimiser = Optimiser(self.network)
        self.step = 0
        self.tokens = {"block": 0, "list": 0}
        self.before_s = 0.0
        self._ended_s: float | None = None
        if options.start is not None:
            self._start(options.start)
        if options.resume:
            self._load()
        if cuda:
            torch.set_float32_matmul_precision("high")
            self.network.compile()
            first = recipe.phases[0].cycle[0]
            self.network.check_compiled(first.rows, first.length)
        self.started = time.monotonic()
        self._masks: dict[int, BlockMask | Tensor] = {}
        self._pending: list[tuple[dict[str, Any], Tensor]] = []

    @property
    def seconds(self) -> float:
        """Training time so far, earlier parts of a resumed run included."""
        if self._ended_s is not None:
            return self._ended_s
        return self.before_s + time.monotonic() - self.started

    def end(self) -> None:
        """Stop the clock and write the last checkpoint."""
        self._ended_s = self.seconds
        self.save()

    @property
    def progress(self) -> float:
        """0 to 1; a time limit takes the place of the recipe's steps."""
        limit = self.options.time_limit_s
        return self.step / self.recipe.steps if limit is None else self.seconds / limit

    def plan(self, step: int) -> BatchPlan:
        """What a coming step reads, by the progress of now (the feed asks some steps ahead)."""
        if self.options.time_limit_s is None:
            return self.recipe.plan(step, step / self.recipe.steps)
        return self.recipe.plan(step, self.progress)

    def _mask(self, length: int) -> "BlockMask | Tensor":
        if length not in self._masks:
            make = flex_mask if self.device.type == "cuda" else dense_training_mask
            self._masks[length] = make(length, self.device)
        return self._masks[length]

    @torch.enable_grad()
    def _losses(self, batch: Batch) -> Tensor:
        """Backward of one batch; the weighted loss, that of answers, and that of answers in all-masked blocks."""
        tokens = torch.from_numpy(batch.tokens.astype("int64")).to(self.device, non_blocking=True)
        kinds = torch.from_numpy(batch.kinds).to(self.device, non_blocking=True)
        generator = torch.Generator(self.device).manual_seed(self.options.seed * 1_000_003 + self.step)
        rows, length = tokens.shape
        if batch.plan.kind == "block":
            masks = block_masks(rows, length, generator, anchored=self.recipe.anchored)
            masked = torch.stack(masks, dim=1)
            losses = self.network.block_losses(tokens, masks, self._mask(length))
            blank = masked.view(rows, 2, -1, 32).all(dim=-1, keepdim=True).expand(-1, -1, -1, 32).flatten(2)
        else:
            prompts = torch.from_numpy(batch.prompts).to(self.device)
            masked = response_mask(prompts, length, generator)[:, None]
            losses = self.network.list_losses(tokens, masked[:, 0])[:, None]
            blank = masked
        weights = kind_weights(kinds, calibrated=self.recipe.calibrated)[:, None] * masked
        loss = (losses * weights).sum() / weights.sum().clamp_min(1.0)
        torch.autograd.backward(loss)
        answers = (kinds == ANSWER)[:, None] & masked
        blank = blank & answers
        parts = [(losses * chosen).sum() / chosen.sum().clamp_min(1) for chosen in (answers, blank)]
        return torch.stack([loss, *parts]).detach()

    def advance(self, batch: Batch) -> None:
        """One step."""
        progress = self.progress
        rate = self.recipe.rate(self.step, progress)
        losses = self._losses(batch)
        self.optimiser.step(rate)
        plan = batch.plan
        self.tokens[plan.kind] += plan.tokens
        if self.step % _LOG_EVERY < len(self.recipe.phases[-1].cycle):
            facts = {
                "step": self.step,
                "progress": round(progress, 4),
                "seconds": round(self.seconds, 1),
                "tokens": sum(self.tokens.values()),
                "kind": plan.kind,
                "length": plan.length,
                "rate": round(rate, 4),
            }
            self._pending.append((facts, losses))
        self.step += 1

    def curve(self) -> list[dict[str, Any]]:
        """Rows of the loss curve since the last call; reading them waits for the device."""
        rows = []
        for facts, losses in self._pending:
            loss, answer, blank = (round(value, 4) for value in losses.tolist())
            rows.append(facts | {"loss": loss, "answer_loss": answer, "blank_answer_loss": blank})
        self._pending.clear()
        return rows

    def model(self, dtype: torch.dtype = torch.bfloat16) -> BlockModel:
        """The network as the executor runs it, rounded as it ships."""
        return BlockModel(self.recipe.shape, self.network.weights(dtype))

    def save(self) -> None:
        """Checkpoint folder and resume state, each file replaced as a whole."""
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as folder:
            write_checkpoint(Path(folder), self.recipe.shape, self.model().weights, shard_bytes=SHARD_BYTES)
            for path in Path(folder).iterdir():
                path.replace(out / path.name)
        for name in SHIPPED_FILES:
            shutil.copyfile(self.options.data / name, out / name)
        (out / "training.json").write_text(json.dumps(self.record(), indent=2) + "\n", encoding="utf-8")
        state = {
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state(),
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "recipe": self.recipe.name,
        }
        partial = self.options.state.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.options.state)

    def _start(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        if checkpoint.shape != replace(self.recipe.shape, name=checkpoint.shape.name):
            message = (
                f"--from {folder}: its shape is not that of recipe {self.recipe.name!r}; train from the seed instead"
            )
            raise ConfigError(message)
        known, read = ((place / "tokenizer.json").read_bytes() for place in (folder, self.options.data))
        if known != read:
            message = (
                f"--from {folder}: its tokenizer.json is not that of {self.options.data}, so its weights read other "
                f"words; make the data with: generate-data --vocabulary {folder}"
            )
            raise ConfigError(message)
        self.network.take(checkpoint.load(self.device, torch.float32).weights)

    def _load(self) -> None:
        state = torch.load(self.options.state, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimiser.load(state["optimiser"])
        self.step, self.tokens, self.before_s = state["step"], state["tokens"], state["seconds"]

    def record(self) -> dict[str, Any]:
        """What the model card needs to know of the run."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        phases = [asdict(phase) for phase in self.recipe.phases]
        return {
            "recipe": self.recipe.name,
            "seed": self.options.seed,
            "start": None if self.options.start is None else self.options.start.name,
            "steps": self.step,
            "clean_tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "parameters": self.recipe.shape.num_params,
            "device": device,
            "torch": torch.__version__,
            "calibrated": self.recipe.calibrated,
            "anchored": self.recipe.anchored,
            "phases": phases,
        }


def _evaluate(trainer: Trainer) -> None:
    options, recipe = trainer.options, trainer.recipe
    material = read_material(options.data, options.data / HELD_OUT_FILE)
    deadline = time.monotonic() + options.evaluate_s
    cells = []
    for found in grid(
        trainer.model(),
        material,
        TASKS,
        recipe.evaluation_contexts,
        options.evaluate_samples,
        deadline_s=deadline,
    ):
        cells.append(found)
        exact = found["exact"]
        _say(
            f"{found['task']:6} at {found['context']:5}: exact {exact['value']:.3f} [{exact['low']:.2f}, "
            f"{exact['high']:.2f}], partial {found['partial']['value']:.3f}, T {found['steps_per_block']:.1f}, "
            f"{found['useful_tokens_per_step']:.1f} tokens a step"
        )
        (options.out / "evaluation.json").write_text(json.dumps(cells, indent=2) + "\n", encoding="utf-8")


def train(recipe: Recipe, options: TrainOptions) -> dict[str, Any]:
    """Train to the end of the recipe or of the time limit; returns the run's record.

    ``options.out`` then holds a checkpoint that :func:`herald_exec.checkpoints.folder.open_checkpoint` reads, the loss
    curve, the record and the evaluation.
    """
    material = read_material(options.data, options.data / HELD_OUT_FILE)
    check_material(recipe, material.encoder.tokenizer.get_vocab_size())
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(recipe, options)
    filler = options.data / TRAIN_FILE
    feed = Feed(options.data, filler, options.seed, trainer.plan, first=trainer.step, workers=options.workers)
    saves = [mark for mark in CHECKPOINT_AT if mark > trainer.progress]
    try:
        with (options.out / "loss.csv").open("a" if options.resume else "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _CURVE)
            if not options.resume:
                writer.writeheader()
            while trainer.progress < 1.0:
                trainer.advance(feed.next())
                if trainer.step % (5 * _LOG_EVERY) == 5 or trainer.progress >= 1.0:
                    rows = trainer.curve()
                    writer.writerows(rows)
                    file.flush()
                    for row in rows[-2:]:
                        _say("  ".join(f"{key} {value}" for key, value in row.items()))
                if saves and trainer.progress >= saves[0]:
                    saves.pop(0)
                    trainer.save()
    finally:
        feed.close()
    trainer.end()
    _say(
        json.dumps(trainer.record()["clean_tokens"]) + f" clean tokens in {trainer.seconds:.0f} s, {trainer.step} steps"
    )
    if options.evaluate_s > 0:
        _evaluate(trainer)
    return trainer.record()
