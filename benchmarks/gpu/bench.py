"""What cells share: arguments, the model once it has been drawn, timing, provenance."""

import argparse
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.cells import Cell
from herald_exec import kernels as cpu_kernels
from herald_exec.models import BlockModel, random_model
from herald_exec.policy import PlannedPolicy
from herald_exec.requests import DecodeRequest
from herald_pipeline import catalogue
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.steps import FixedSteps

STEPS, BLOCKS = 20, 6
"""T, and blocks of an answer: from six on, figures leave out two (:func:`herald_pipeline.result.warm_up_blocks`)."""
FILL_GB_S = 4.2
"""Rate at which the first run on an H200 machine filled the host's pool with random KV."""


class Bench:
    """Arguments, and the model once it has been drawn. Without a GPU (tests) all runs on the CPU, at tiny sizes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.device = torch.device(args.device)
        self.shape = catalogue.resolve(args.model)
        self._model: BlockModel | None = None
        self.warm = False
        self.fill_gb_s = FILL_GB_S

    def note_run(self, filled_gb: float, before_s: float) -> None:
        """What a run tells of the next one: kernels are compiled, and how long its host pool took."""
        if self.warm and filled_gb and before_s > 0:
            self.fill_gb_s = min(200.0, filled_gb / before_s)
        self.warm = True

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    @property
    def kv_dtype(self) -> str:
        """Name of the format of KV, in both memories."""
        return "bf16" if self.on_cuda else "fp32"

    @property
    def pipeline_dtype(self) -> KVDtype:
        """Format of KV, as sizes are asked for."""
        return KVDtype(self.kv_dtype)

    def drop_model(self) -> None:
        """Give the model's memory back; the next cell that needs it draws it again."""
        self._model = None
        self.free()

    @property
    def model(self) -> BlockModel:
        """Random weights on the device, drawn at first use."""
        if self._model is None:
            dtype = torch.bfloat16 if self.on_cuda else torch.float32
            self._model = random_model(self.shape, seed=0, device=self.device, dtype=dtype)
        return self._model

    def pipeline(self, cell: Cell) -> Pipeline:
        """The description of a cell's method with what the cell changes."""
        changes: dict[str, Any] = {"kv_dtype": self.kv_dtype, "dram_kv_dtype": self.kv_dtype}
        if "budget" in cell.options:
            changes["budget"] = cell.options["budget"]
        if "exact" in cell.options:
            changes["exact_layers_on"] = cell.options["exact"]
        if "gather" in cell.options:
            changes["gather"] = cell.options["gather"]
        if "keys" in cell.options:
            keys = str(cell.options["keys"])
            changes["keys"] = "key-only" if keys == "only" else keys
        return build(self.shape, cell.what, **changes)

    def steps(self, cell: Cell) -> int:
        """T."""
        return int(cell.options.get("T", min(STEPS, self.shape.block_length)))

    def blocks(self, cell: Cell) -> int:
        """Blocks of an answer."""
        return int(cell.options.get("blocks", BLOCKS))

    def threads(self, cell: Cell) -> int | None:
        """Threads of the CPU kernels; ``None``: all."""
        return int(cell.options["threads"]) if "threads" in cell.options else self.args.threads

    def requests(self, cell: Cell) -> list[DecodeRequest]:
        """Requests of one length; what a prompt holds does not matter to synthetic KV."""
        prompt = tuple(i % min(1000, self.shape.vocab_size - 3) for i in range(cell.context))
        new = self.shape.block_length * self.blocks(cell)
        return [DecodeRequest(i, prompt, new) for i in range(cell.batch)]

    def policy(self, steps: int) -> PlannedPolicy:
        """T steps a block, by confidence."""
        plan = FixedSteps(steps, self.shape.block_length)
        return PlannedPolicy(plan, Sampler(mask_token_id=self.shape.mask_token_id))

    def known_rates(self) -> dict[str, float]:
        """What the cell ``rates`` found; empty where it has not run."""
        path = self.out / "rates.json"
        found = json.loads(path.read_text()).get("result", {}) if path.exists() else {}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def free(self) -> None:
        """Give back what a cell has left."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()


def timed_ms(bench: Bench, work: Callable[[], object], repeats: int = 10, warm: int = 3) -> list[float]:
    """Milliseconds of each repeat, on the device's clock where there is one."""
    for _ in range(warm):
        work()
    if not bench.on_cuda:
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            found.append((time.perf_counter() - start) * 1e3)
        return found
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        work()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def rates(bench: Bench, _: Cell) -> dict[str, Any]:
    """Raw rates of this machine, measured beside the cells that they bound."""
    large = bench.on_cuda
    found: dict[str, Any] = {
        "dram_read_gb_s": cpu_kernels.read_bandwidth_gb_s((8 << 30) if large else (64 << 20), bench.args.threads)
    }
    size = (2 << 30) if large else (16 << 20)
    make = {"device": bench.device}
    big = torch.randint(0, 255, (size,), dtype=torch.uint8, **make)
    other = torch.empty_like(big)
    found["hbm_copy_gb_s"] = 2 * size / median(timed_ms(bench, lambda: other.copy_(big))) / 1e6
    found["hbm_read_gb_s"] = size / median(timed_ms(bench, lambda: big.view(torch.float32).sum())) / 1e6
    pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=large)
    part = big[: pinned.numel()]
    up = timed_ms(bench, lambda: part.copy_(pinned, non_blocking=True))
    down = timed_ms(bench, lambda: pinned.copy_(part, non_blocking=True))
    found["h2d_gb_s"], found["d2h_gb_s"] = (pinned.numel() / median(ms) / 1e6 for ms in (up, down))
    n = 8192 if large else 256
    a, b = (torch.randn(n, n, dtype=torch.bfloat16 if large else torch.float32, **make) for _ in "ab")
    found["gemm_tflop_s"] = 2 * n**3 / median(timed_ms(bench, lambda: a @ b)) / 1e9
    return found


def facts(bench: Bench) -> dict[str, Any]:
    """Provenance of every cell."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("BENCH_COMMIT") or (asked.stdout.strip() if asked.returncode == 0 else "unknown")
    return {
        "provenance": "measured",
        "gpu": torch.cuda.get_device_name() if bench.on_cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "kernel_tier": cpu_kernels.active_tier(),
        "kernel_tuning": os.environ.get("HERALD_TUNING", "default"),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "model": bench.args.model,
        "weights": "random",
        "kv": "synthetic",
        "threads": bench.args.threads,
    }
