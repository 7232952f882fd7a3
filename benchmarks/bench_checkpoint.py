"""A full-size folder of random weights: written, loaded with its peak of host memory, and decoded by every method.

    python benchmarks/bench_checkpoint.py --model llada2-mini --folder /tmp/mini --device cuda --out benchmarks/results
    python benchmarks/bench_checkpoint.py --model tiny --folder /tmp/tiny --dtype fp32

Loading runs in a process of its own, so that the peak is its own; the bound is 1.1 times the largest shard over what
that process held before (on a CPU the weights themselves are held too, and count).
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.checkpoints.memory import resolve_device, resolve_dtype
from herald_exec.checkpoints.writing import write_checkpoint
from herald_exec.decoding import decode_prompts
from herald_exec.generate import decode_settings
from herald_exec.models import random_weights
from herald_pipeline import catalogue, methods
from herald_pipeline.errors import HeraldError


def peak_host_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Write the folder; its size and the time."""
    shape = catalogue.get(name)
    weights = random_weights(shape, device, dtype, seed=0)
    started = time.perf_counter()
    write_checkpoint(folder, shape, weights)
    seconds = time.perf_counter() - started
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return {"write_s": seconds, "folder_bytes": sum(shards), "shards": len(shards), "largest_shard_bytes": max(shards)}


def load_and_decode(folder: Path, device: torch.device, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Load, measure, decode with every method that can be executed."""
    checkpoint = open_checkpoint(folder)
    torch.zeros(1, device=device)
    checkpoint.load("meta")
    before = peak_host_bytes()
    started = time.perf_counter()
    model = checkpoint.load(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    result: dict[str, Any] = {"load_s": time.perf_counter() - started, "load_peak_bytes": peak_host_bytes() - before}
    result["weights_on_host_bytes"] = model.weights.nbytes() if device.type == "cpu" else 0
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, model.shape.vocab_size - 1, (2, prompt_tokens), generator=generator).tolist()
    result["methods"] = {}
    print(f"loaded in {result['load_s']:.1f} s", file=sys.stderr, flush=True)
    for name in methods.names():
        if not methods.get(name).simulated_only:
            result["methods"][name] = decode(model, prompts, name, new_tokens)
            print(f"{name}: {result['methods'][name]}", file=sys.stderr, flush=True)
    return result


def decode(model: Any, prompts: list[list[int]], method: str, new_tokens: int) -> dict[str, Any]:
    """Answers' lengths, forwards and time of one method, or why it did not run."""
    settings = decode_settings(
        model.shape,
        max_tokens=new_tokens,
        block=None,
        decoder="static",
        threshold=None,
        scheduler="fixed",
        cache="none",
        steps=8,
        method=method,
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    try:
        counts = decode_prompts(model, prompts, settings, lambda piece: bool(tokens[piece.prompt].extend(piece.tokens)))
    except (HeraldError, RuntimeError) as error:  # a method that fails is a row of the table, not the end of it
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "tokens": [len(row) for row in tokens],
        "forwards": [row.forwards for row in counts],
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llada2-mini")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=["write", "load"])
    options = parser.parse_args()
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype)
    assert dtype is not None
    if options.part == "write":
        print(json.dumps(write(options.model, options.folder, device, dtype)))
        return
    if options.part == "load":
        print(json.dumps(load_and_decode(options.folder, device, options.prompt_tokens, options.new_tokens)))
        return
    result: dict[str, Any] = {"model": options.model, "device": options.device, "dtype": options.dtype}
    for part in ("write", "load"):
        command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result |= json.loads(out)
    allowed = 1.1 * result["largest_shard_bytes"] + result["weights_on_host_bytes"]
    result["load_peak_within_bound"] = result["load_peak_bytes"] <= allowed
    result["torch"] = torch.__version__
    result["python"] = platform.python_version()
    text = json.dumps(result, indent=2)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"checkpoint_{options.model}_{device.type}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
