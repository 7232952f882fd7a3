"""Pages: what is written is what is read, wherever it starts."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herald_exec import kernels
from herald_pipeline.errors import CapacityError, ConfigError, RunError


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 200)), min_size=1, max_size=6))
def test_overlapping_appends_read_back_like_a_plain_array(writes):
    pool = kernels.PagedKV(1, 1, 2, 450, 8, "fp32")
    plain = np.zeros((pool.capacity_tokens, 2, 8), np.float32)
    for number, (start, tokens) in enumerate(writes):
        rows = (
            np.full((tokens, 2, 8), number + 1, np.float32) + np.arange(tokens, dtype=np.float32)[:, None, None] / 1000
        )
        pool.append(0, 0, start, rows, -rows)
        plain[start : start + tokens] = rows
    k, v = pool.read(0, 0, 0, 450)
    np.testing.assert_array_equal(k, plain[:450])
    np.testing.assert_array_equal(v, -plain[:450])


def test_slots_layers_and_heads_do_not_overlap():
    pool = kernels.PagedKV(2, 3, 2, 70, 8, "fp16")
    for layer in range(2):
        for slot in range(3):
            rows = np.full((70, 2, 8), layer * 10 + slot, np.float16) + np.array([0, 100], np.float16)[None, :, None]
            pool.append(layer, slot, 0, rows, rows)
    for layer in range(2):
        for slot in range(3):
            k, _ = pool.read(layer, slot, 0, 70)
            assert (k[:, 0] == layer * 10 + slot).all()
            assert (k[:, 1] == layer * 10 + slot + 100).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1, 1, 64, 64), ConfigError, "num_layers must be >= 1"),
        ((1, 1, 1, 64, 12), ConfigError, "head_dim must be a multiple of 8 up to 256, got 12"),
        ((1, 1, 1, 64, 264), ConfigError, "got 264"),
        ((1, 1, 1, 64, 64, "bf15"), ConfigError, "did you mean 'bf16'"),
        ((4096, 4096, 128, 1 << 30, 256), CapacityError, "cannot be mapped"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        kernels.PagedKV(*arguments)


def test_an_append_beyond_the_slot_names_the_positions():
    pool = kernels.PagedKV(1, 1, 1, 64, 8, "fp32")
    rows = np.zeros((10, 1, 8), np.float32)
    with pytest.raises(CapacityError, match=r"positions 60..70 do not fit in slot 0 of 64 tokens"):
        pool.append(0, 0, 60, rows, rows)


def test_another_dtype_is_refused_and_not_converted():
    pool = kernels.PagedKV(1, 1, 1, 64, 8)
    rows = np.zeros((10, 1, 8), np.float32)
    with pytest.raises(ConfigError, match="k must be bf16, got fp32"):
        pool.append(0, 0, 0, rows, rows)


def big_pool():
    """Larger than what any other mapping would come to fill at once."""
    return kernels.PagedKV(1, 64, 8, 65_536, 128)


def test_a_closed_pool_says_so():
    pool = kernels.PagedKV(1, 1, 1, 64, 8, "fp32")
    pool.close()
    pool.close()
    with pytest.raises(RunError, match="closed"):
        pool.read(0, 0, 0, 1)


@pytest.mark.parametrize(
    "hold", ["held = pool", "pool.itself = pool", "keys.itself = keys", "import sys; sys.pool = pool"]
)
def test_a_script_that_closes_no_pool_ends_in_silence(hold):
    """Whatever holds the pool, in a ring of references or beyond the modules: nothing frees into torn-down modules."""
    script = "from herald_exec import kernels; pool = kernels.PagedKV(1, 1, 1, 64, 8); keys = kernels.Int8Keys(pool)"
    ended = subprocess.run([sys.executable, "-c", f"{script}; {hold}"], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def is_mapped(address):
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


@pytest.mark.parametrize("made", [lambda: big_pool(), lambda: kernels.Int8Keys(big_pool())], ids=["pool", "keys"])
def test_memory_is_freed_with_its_last_holder(made):
    holder = made()
    address = holder.address
    assert is_mapped(address)
    del holder
    gc.collect()
    assert not is_mapped(address)


def test_rounding_to_bf16_is_to_nearest_even():
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, np.inf, np.nan, -1e-40], np.float32)
    back = kernels.to_float32(kernels.from_float32(values, "bf16"), "bf16")
    assert back[:4].tolist() == [1.0, 1.0, 1.0 + 2**-6, np.inf]
    assert np.isnan(back[4])


def test_touching_first_makes_memory_resident_and_leaves_contents():
    pool = kernels.PagedKV(1, 1, 2, 40_000, 64)
    pool.pages[0, 0, 0, 0, 0, 0, :4] = (1, 2, 3, 4)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes
    pool.first_touch(2)
    after = int(Path("/proc/self/statm").read_text().split()[1]) * page_bytes
    assert after - before > 0.8 * pool.nbytes
    assert pool.pages[0, 0, 0, 0, 0, 0, :4].tolist() == [1, 2, 3, 4]
    assert not pool.pages[0, 0, 1].any()
