"""Training batches made by worker processes ahead of the steps that read them.

A batch depends on the seed, its step and its plan alone, never on which worker made it or when. This module imports no
torch, so that workers start quickly.
"""

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from herald_exec.reference.documents import block_row, list_row
from herald_exec.reference.recipe import BatchPlan
from herald_exec.reference.tasks import Material, read_material
from herald_pipeline.errors import RunError

_PATIENCE_S = 120.0


class Batch(NamedTuple):
    """``tokens`` and ``kinds`` ``[rows, L]``; ``prompts`` ``[rows]`` where responses start (bidirectional steps)."""

    plan: BatchPlan
    tokens: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    prompts: NDArray[np.int64]


def make_batch(material: Material, seed: int, step: int, plan: BatchPlan) -> Batch:
    """The batch of one step."""
    draw = block_row if plan.kind == "block" else list_row
    seeds = (f"train/{seed}/{step}/{row}" for row in range(plan.rows))
    rows = [draw(material, Random(row_seed), plan.length, wording=plan.wording, focus=plan.focus) for row_seed in seeds]
    return Batch(
        plan,
        np.stack([row.tokens for row in rows]),
        np.stack([row.kinds for row in rows]),
        np.asarray([row.prompt for row in rows], dtype=np.int64),
    )


def _work(folder: Path, filler: Path, seed: int, requests: Any, results: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        material = read_material(folder, filler)
        while (request := requests.get()) is not None:
            step, plan = request
            results.put((step, make_batch(material, seed, step, plan)))
    except Exception:
        results.put((-1, traceback.format_exc()))


class Feed:
    """Batches in step order, made ``ahead`` steps early by ``workers`` processes (0: in this one, when asked for).

    Parameters
    ----------
    plan
        What step n reads; called once for each step, in order, ``ahead`` steps early.
    """

    def __init__(
        self, folder: Path, filler: Path, seed: int, plan: Callable[[int], BatchPlan], *, first: int, workers: int
    ) -> None:
        self._plan, self._seed, self._step = plan, seed, first
        self._material = read_material(folder, filler) if workers == 0 else None
        self._ready: dict[int, Batch] = {}
        self._next_request = first
        context = multiprocessing.get_context("spawn")
        self._requests, self._results = context.Queue(), context.Queue()
        arguments = (folder, filler, seed, self._requests, self._results)
        self._workers = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
        for worker in self._workers:
            worker.start()
        self._ahead = 3 * workers

    def next(self) -> Batch:
        """The next step's batch.

        Raises
        ------
        RunError
            A worker failed (its traceback is the message) or made nothing for two minutes.
        """
        if self._material is not None:
            batch = make_batch(self._material, self._seed, self._step, self._plan(self._step))
            self._step += 1
            return batch
        while self._next_request < self._step + self._ahead:
            self._requests.put((self._next_request, self._plan(self._next_request)))
            self._next_request += 1
        while self._step not in self._ready:
            try:
                step, made = self._results.get(timeout=_PATIENCE_S)
            except queue.Empty:
                message = f"no training batch came in {_PATIENCE_S:.0f} s; use fewer --workers if memory is short"
                raise RunError(message) from None
            if step < 0:
                message = f"a worker that makes training batches failed:\n{made}"
                raise RunError(message)
            self._ready[step] = made
        self._step += 1
        return self._ready.pop(self._step - 1)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join(timeout=5)
