"""Independent replicas of a run, one a GPU, at the same time on one host: what sharing its sockets and DRAM costs.

Each replica is a process that sees one GPU and owns an equal part of the cores. All draw their model and fill their
pool first; then replica 0 runs alone while the others stand still, and after that all run, released by one line each.
The rate of all together is counted in the span in which every replica decodes, by the machine's one monotonic clock.

The parent speaks with a replica by lines: it is told ``ready``, sends ``go``, and is answered with a line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

REPLICAS, LIMIT_S = 2, 240.0
"""Replicas of a cell that does not say (``gpus=``), and seconds after which none is waited for."""
TRIAL_BLOCKS = 2
"""Blocks of the run that comes before any that counts: it fills the pool and compiles kernels."""


def replicas(bench: Any, cell: Any) -> dict[str, Any]:
    """Replica 0 alone, then all at once; throughputs, the rate of all together, and what of ``count`` times it is."""
    from herald_exec.kernels import kept
    from herald_pipeline.errors import ConfigError

    count = int(cell.options.get("gpus", REPLICAS))
    _check_room(bench, cell, count)
    bench.drop_model()
    kept.release()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        workers = [closing.enter_context(_Worker(bench, cell, i, count, Path(folder))) for i in range(count)]
        watch = threading.Timer(LIMIT_S, lambda: [worker.kill() for worker in workers])
        watch.daemon = True
        watch.start()
        closing.callback(watch.cancel)
        for worker in workers:
            if worker.answer() != "ready":
                raise ConfigError(worker.why())
        alone = workers[0].run()
        for worker in workers:
            worker.go()
        together = [worker.result() for worker in workers]
    return {"cores": [worker.cores for worker in workers], **summary(alone, together, bench.shape.block_length)}


def summary(alone: dict[str, Any], together: Sequence[dict[str, Any]], block_length: int) -> dict[str, Any]:
    """Figures of one replica by itself and of all at once; ``scaling`` is the rate of all over that of the one."""
    rate = common_rate([each["block_ends_s"] for each in together], together[0]["batch"] * block_length)
    found: dict[str, Any] = {"replicas": len(together), "alone": alone, "together": list(together)}
    found["alone_tok_s"] = alone["throughput_tok_s"]
    found["each_tok_s"] = [each["throughput_tok_s"] for each in together]
    found["throughput_tok_s"] = rate
    if rate is not None and alone["throughput_tok_s"]:
        found["scaling"] = rate / alone["throughput_tok_s"]
    return found


def common_rate(block_ends_s: Sequence[Sequence[float]], tokens_a_block: int) -> float | None:
    """Tokens a second of all replicas while every one of them decodes; ``None`` where they never did.

    Each counts the share of its blocks that lies in the span from the last first block's end to the first last one's.
    """
    begin, end = max(ends[0] for ends in block_ends_s), min(ends[-1] for ends in block_ends_s)
    if end <= begin:
        return None
    blocks = 0.0
    for ends in block_ends_s:
        for start, stop in pairwise(ends):
            inside = min(stop, end) - max(start, begin)
            blocks += max(0.0, inside) / (stop - start)
    return blocks * tokens_a_block / (end - begin)


def parts_of(cores: Sequence[int], count: int) -> list[list[int]]:
    """Neighbouring cores, equally many for each: on a host of two sockets a socket each, as Linux numbers them."""
    size = len(cores) // count
    return [list(cores[i * size : (i + 1) * size]) for i in range(count)]


def _check_room(bench: Any, cell: Any, count: int) -> None:
    import torch

    from calibration.parts.memory import host_limit_bytes
    from herald_pipeline.errors import ConfigError

    problems = []
    if bench.on_cuda and torch.cuda.device_count() < count:
        problems.append(f"{cell.name}: {count} replicas need as many GPUs, {torch.cuda.device_count()} are here")
    if len(os.sched_getaffinity(0)) < count:
        problems.append(f"{cell.name}: {count} replicas need a core each, {len(os.sched_getaffinity(0))} are here")
    needed = count * cell.batch * cell.context * bench.shape.kv_bytes_per_token(bench.pipeline_dtype)
    limit = host_limit_bytes()
    if needed > 0.95 * limit:
        problems.append(f"{cell.name}: {needed / 1e9:.0f} GB of KV do not fit into {limit / 1e9:.0f} GB of host memory")
    if problems:
        raise ConfigError(problems)


class _Worker:
    """A replica's process, seen from the parent."""

    def __init__(self, bench: Any, cell: Any, index: int, count: int, folder: Path) -> None:
        self.cores = parts_of(sorted(os.sched_getaffinity(0)), count)[index]
        self._index = index
        self._log: IO[str] = (folder / f"{index}.log").open("w+")
        args = bench.args
        command = [sys.executable, "-m", "benchmarks.gpu.replicas", cell.name, "--out", str(folder)]
        command += ["--model", args.model, "--device", args.device, "--cores", ",".join(map(str, self.cores))]
        command += ["--threads", str(args.threads)] if args.threads else []
        visible = {"CUDA_VISIBLE_DEVICES": _visible(index)} if bench.on_cuda else {}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **visible},
        )  # fmt: skip

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def kill(self) -> None:
        """End it, whatever it does: its memory is the system's to take back."""
        self._process.kill()

    def go(self) -> None:
        """Let it run once."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Its next line; empty where it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def result(self) -> dict[str, Any]:
        """What it found in the run under way."""
        from herald_pipeline.errors import RunError

        line = self.answer()
        if not line:
            raise RunError(self.why())
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self) -> dict[str, Any]:
        """Let it run, and wait for what it finds."""
        self.go()
        return self.result()

    def why(self) -> str:
        """What its log ends with."""
        self._log.flush()
        self._log.seek(0)
        return f"replica {self._index} ended early: {self._log.read()[-600:].strip() or 'no word in its log'}"


def _visible(index: int) -> str:
    """The device of this number among those that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[index] if given else str(index)


# The replica's side --------------------------------------------------------------------------------------------------


def main(given: list[str] | None = None) -> int:
    """One replica: prepare, say so, run once for every line that comes in."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.replicas")
    parser.add_argument("cell")
    for name in ("--out", "--model", "--device", "--cores"):
        parser.add_argument(name, required=True)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args(given)
    args.out, args.hardware, args.trace = Path(args.out), None, False
    # Before anything is imported that asks how many cores there are.
    os.sched_setaffinity(0, {int(core) for core in args.cores.split(",")})
    # Lines to the parent go where nothing else prints.
    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from benchmarks.gpu.bench import Bench
    from benchmarks.gpu.cells import parse
    from herald_exec.kernels import kept

    bench, cell = Bench(args), parse(args.cell)
    with kept.keep_memory():
        _run(bench, cell, TRIAL_BLOCKS)
        print("ready", file=to_parent, flush=True)
        for _ in sys.stdin:
            print(json.dumps(_run(bench, cell, bench.blocks(cell))), file=to_parent, flush=True)
    return 0


def _run(bench: Any, cell: Any, blocks: int) -> dict[str, Any]:
    """The run's result and when its blocks ended."""
    from benchmarks.gpu.cells import Cell
    from benchmarks.gpu.runs import run

    told: list[float] = []
    options = {name: value for name, value in cell.options.items() if name != "gpus"} | {"blocks": blocks}

    def on_block(_request: int, _tokens: object) -> bool:
        told.append(time.monotonic())
        return False

    found = run(bench, Cell(cell.name, "run", cell.what, cell.context, cell.batch, options), on_block=on_block)
    # All rows of a batch cross a block together: the last one to be told of it ends it.
    found["block_ends_s"] = told[cell.batch - 1 :: cell.batch]
    bench.free()
    return found


if __name__ == "__main__":
    sys.exit(main())
