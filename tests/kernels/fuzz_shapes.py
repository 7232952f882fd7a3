"""Random shapes, options and poison against the definition, for as long as asked; not part of the test suite.

    python tests/kernels/fuzz_shapes.py --seconds 600
    HERALD_CPU=portable python tests/kernels/fuzz_shapes.py --seconds 60 --seed 7

Prints the case of the first difference and exits 1. Run it on a build with AddressSanitizer too (see
tests/kernels/sanitize.sh).
"""

import argparse
import os
import sys
import time

import numpy as np

from herald_exec import kernels
from herald_exec.kernels.checking import EDGE_SIZES, TUNINGS, Case, run_case
from herald_exec.kernels.options import SelectOptions


def random_case(rng: np.random.Generator, seed: int) -> Case:
    """One case; sizes crowd around tile and chunk borders."""
    rows = int(rng.integers(1, 4))

    def size() -> int:
        kind = rng.random()
        if kind < 0.5:
            return int(rng.choice(EDGE_SIZES))
        if kind < 0.9:
            return int(rng.integers(0, 700))
        return int(rng.choice([2047, 2048, 2049, 4100, 8191, 8193]))

    lengths = tuple(size() for _ in range(rows))
    group, x = int(rng.integers(1, 9)), int(rng.choice([1, 1, 2, 3, 4, 8]))
    flat, key_only = bool(rng.random() < 0.2), bool(rng.random() < 0.2)
    keys8 = not flat and bool(rng.random() < 0.3)
    options = SelectOptions(
        pv=str(rng.choice(["auto", "f32", "bf16"])),
        key_only=key_only,
        smoothing=1 if keys8 else int(rng.choice([1, 1, 3, 7])),
        paper_like=not key_only and not keys8 and bool(rng.random() < 0.1),
        candidates=float(rng.choice([1.0, 1.1, 1.25, 2.0])),
        tuning=TUNINGS[rng.integers(len(TUNINGS))],
    )
    return Case(
        lengths=lengths,
        budget=tuple(int(rng.integers(0, length + 3)) for length in lengths),
        heads=int(rng.integers(1, 4)),
        group=group,
        x=x,
        head_dim=int(rng.choice([8, 16, 24, 32, 48, 64, 80, 96, 128, 136, 256])),
        dtype=str(rng.choice(["bf16", "bf16", "fp16", "fp32"])),
        draft=tuple(int(rng.integers(0, 70)) for _ in range(rows)) if rng.random() < 0.4 else None,
        own_key=bool(rng.random() < 0.3),
        flat=flat,
        keys8=keys8,
        score_scale=float(rng.choice([1.0, 1.0, 5.0])),
        poison="" if flat else str(rng.choice(["", "", "", "nan", "inf", "denormal"])),
        options=options,
        threads=int(rng.integers(1, 4)),
        seed=seed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end, count = time.monotonic() + options.seconds, 0
    tiers = [kernels.active_tier()] if "HERALD_CPU" in os.environ else kernels.usable_tiers()
    while time.monotonic() < end:
        case = random_case(np.random.default_rng([options.seed, count]), count)
        for tier in tiers:
            kernels.set_tier(tier)
            result = run_case(case)
            if result.problems:
                print(f"seed {options.seed}, case {count}, {tier}: {case}\n{result.problems}")
                return 1
        count += 1
    print(f"{count} cases on {', '.join(tiers)}: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
