"""The tier: chosen for the machine, forced by hand, refused when the machine lacks it."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from herald_exec import kernels
from herald_exec.kernels import _core
from herald_pipeline.errors import ConfigError

SHOW = "from herald_exec import kernels; print(kernels.active_tier())"
REPORT = """
import sys
from herald_exec import kernels
from herald_pipeline.errors import HeraldError
try:
    print(kernels.active_tier())
except HeraldError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


def in_a_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize("name", kernels.usable_tiers())
def test_the_variable_forces_each_usable_tier(name):
    assert in_a_process(SHOW, HERALD_CPU=name).stdout.strip() == name


def test_the_best_usable_tier_is_the_default():
    assert in_a_process(SHOW, HERALD_CPU="").stdout.strip() == kernels.usable_tiers()[-1]


def test_a_tier_that_the_machine_lacks_is_a_sentence_and_no_crash():
    missing = [name for name in kernels.tier_names() if name not in kernels.usable_tiers()]
    for name in missing:
        found = in_a_process(REPORT, HERALD_CPU=name)
        assert found.returncode == 1
        assert f"HERALD_CPU={name}" in found.stderr
        assert "Traceback" not in found.stderr


def test_a_tier_that_does_not_exist_is_refused_with_a_suggestion():
    found = in_a_process(REPORT, HERALD_CPU="avx1024")
    assert found.returncode == 1
    assert "unknown instruction set in HERALD_CPU 'avx1024'; did you mean 'avx" in found.stderr
    with pytest.raises(ConfigError, match="unknown instruction set"):
        kernels.set_tier("sse9")


def test_every_tier_selects_the_same_indices():
    rng = np.random.default_rng(0)
    pool = kernels.PagedKV(1, 1, 2, 5000, 128)
    k, v = (kernels.from_float32(rng.standard_normal((5000, 2, 128)), "bf16") for _ in range(2))
    pool.append(0, 0, 0, k, v)
    queries = rng.standard_normal((1, 1, 8, 128)).astype(np.float32)
    before, found = kernels.active_tier(), []
    for name in kernels.usable_tiers():
        kernels.set_tier(name)
        found.append(kernels.select(pool, 0, [0], [5000], queries, [250]).indices.tolist())
    kernels.set_tier(before)
    assert all(each == found[0] for each in found)


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump (binutils)")
def test_wide_registers_appear_only_in_functions_of_their_tier():
    """AVX in portable code, or 512-bit code in the AVX2 tier, would be an illegal instruction on an older machine."""
    shown = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    allowed = {"ymm": ("avx2", "avx512", "avx512bf16", "amx"), "zmm": ("avx512", "avx512bf16", "amx"), "tmm": ("amx",)}
    function, seen, wrong = "", dict.fromkeys(allowed, 0), set()
    for line in shown.splitlines():
        if label := re.match(r"[0-9a-f]+ <(.+)>:", line):
            function = label[1]
        for register in allowed:
            if f"%{register}" in line:
                seen[register] += 1
                if not any(function.startswith(f"herald_{tier}_") for tier in allowed[register]):
                    wrong.add((function, register))
    assert not wrong
    for name, built, _usable in _core.tiers():
        register = {"avx2": "ymm", "avx512": "zmm", "amx": "tmm"}.get(name)
        if built and register:
            assert seen[register] > 0, f"{name} was built and uses no {register} registers"


def test_selection_and_gather_at_once_both_finish_and_agree():
    rng = np.random.default_rng(0)
    pool = kernels.PagedKV(1, 4, 2, 8000, 64)
    pool.fill_normal(3)
    queries = rng.standard_normal((4, 1, 4, 64)).astype(np.float32)
    slots, lengths, budget = np.arange(4), np.full(4, 8000), np.full(4, 400)
    expected = kernels.select(pool, 0, slots, lengths, queries, budget)
    want = [np.zeros((4, 2, 400, 64), np.uint16) for _ in range(2)]
    kernels.gather(pool, 0, slots, expected, *want)
    stop = time.monotonic() + 1.0
    counts, wrong = [0, 0], []

    def selecting():
        while time.monotonic() < stop:
            counts[0] += 1
            if kernels.select(pool, 0, slots, lengths, queries, budget).output.tobytes() != expected.output.tobytes():
                wrong.append("select")

    def gathering():
        out = [np.zeros_like(want[0]) for _ in range(2)]
        while time.monotonic() < stop:
            counts[1] += 1
            kernels.gather(pool, 0, slots, expected, *out)
            if out[0].tobytes() != want[0].tobytes():
                wrong.append("gather")

    both = [threading.Thread(target=selecting), threading.Thread(target=gathering)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in both)
    assert not wrong
    assert min(counts) > 1


def test_a_child_after_fork_has_working_kernels():
    code = """
import os, numpy as np
from herald_exec import kernels
pool = kernels.PagedKV(1, 2, 2, 5000, 64)
pool.fill_normal(1)
queries = np.ones((2, 1, 4, 64), np.float32)
ask = lambda: kernels.select(pool, 0, [0, 1], [5000, 5000], queries, [10, 10], threads=2).indices
first = ask()
child = os.fork()
if child == 0:
    os._exit(0 if (ask() == first).all() else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    found = in_a_process(code)
    assert found.stdout.strip() == "0", found.stderr


def test_capabilities_are_plain_data():
    found = kernels.capabilities()
    assert json.loads(json.dumps(found)) == found
    assert found["active"] in found["usable"]
    assert found["threads"] >= 1
