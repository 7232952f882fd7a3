"""Selection against the float64 definition, per instruction set."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from herald_exec import kernels
from herald_exec.kernels import _core
from herald_exec.kernels.checking import Case, cases, run_case
from herald_exec.kernels.elements import DTYPES
from herald_exec.kernels.options import PV
from herald_pipeline.errors import CapacityError, ConfigError

CASES = list(cases())


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_selection_and_gather_agree_with_the_definition(tier, case):
    result = run_case(case)
    assert not result.problems, f"{tier}, {case}: {result.problems}"


def filled_pool(rows=2, heads=2, length=300, head_dim=64, dtype="bf16", seed=0, num_layers=1):
    rng = np.random.default_rng(seed)
    pool = kernels.PagedKV(num_layers, rows, heads, length, head_dim, dtype)
    for layer in range(num_layers):
        for row in range(rows):
            k, v = (kernels.from_float32(rng.standard_normal((length, heads, head_dim)), dtype) for _ in range(2))
            pool.append(layer, row, 0, k, v)
    return pool


def run(pool, lengths, budget, x=1, group=2, threads=None, seed=1, **more):
    rows = len(lengths)
    shape = (rows, x, pool.num_kv_heads * group, pool.head_dim)
    queries = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return kernels.select(pool, 0, np.arange(rows), lengths, queries, budget, threads=threads, **more)


@pytest.mark.parametrize("x", [1, 8])
def test_results_have_the_same_bits_for_any_number_of_threads(tier, x):
    pool = filled_pool(rows=1, heads=2, length=20_000)
    options = kernels.SelectOptions(keep_importance=True)
    alone = run(pool, np.array([20_000]), np.array([1000]), x=x, threads=1, options=options)
    for threads in (2, 5):
        many = run(pool, np.array([20_000]), np.array([1000]), x=x, threads=threads, options=options)
        for name in ("output", "indices", "counts", "status", "importance"):
            assert getattr(alone, name).tobytes() == getattr(many, name).tobytes(), name


@pytest.mark.parametrize("x", [1, 2, 8])
@pytest.mark.parametrize("at", [100, 8192 + 100, 2 * 8192 + 200])
def test_a_score_far_above_all_before_it_leaves_the_same_bits_for_any_number_of_threads(tier, x, at):
    """Where a block that is done again begins and ends may not depend on which thread began where."""
    pool = filled_pool(rows=1, heads=2, length=20_000)
    for row in (at, at + 90):  # about 2^80 above: tiles do a block again, and what went before still weighs something
        pool.pages[0, 0, :, row // 64, 0, row % 64] = kernels.from_float32(np.full(64, 9.0), "bf16")
    options = kernels.SelectOptions(keep_importance=True)
    found = []
    for threads in (1, 2, 4):
        queries = np.abs(np.random.default_rng(1).standard_normal((1, x, 8, 64))).astype(np.float32)
        place = (np.array([0]), np.array([20_000]), queries, np.array([1000]))
        got = kernels.select(pool, 0, *place, threads=threads, options=options)
        found.append([getattr(got, name).tobytes() for name in ("output", "indices", "importance")])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("x", [1, 2, 8])
@pytest.mark.parametrize("key_only", [False, True])
def test_nothing_is_read_behind_the_last_key(tier, x, key_only):
    """K and V end where memory does: a read behind them would end the process."""
    code = f"""
import ctypes, mmap
import numpy as np
from herald_exec import kernels

def rows_before_a_wall(tokens):
    nbytes = tokens * 128 * 2
    whole = mmap.mmap(-1, -(-nbytes // 4096) * 4096 + 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    wall = start + len(whole) - 4096
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(wall), 4096, 0) == 0
    memory = (ctypes.c_char * nbytes).from_address(wall - nbytes)
    memory.keep = whole
    found = np.frombuffer(memory, np.uint16).reshape(1, 1, tokens, 128)
    found[:] = kernels.from_float32(np.random.default_rng(0).standard_normal(found.shape), "bf16")
    return found

for tokens in (1, 63, 65, 100, 193, 449, 2049):
    store = kernels.FlatKV(rows_before_a_wall(tokens), rows_before_a_wall(tokens))
    queries = np.ones((1, {x}, 4, 128), np.float32)
    for tuning in (kernels.Tuning(distance=2), kernels.Tuning(distance=4, streams=4, tiles=True, even=True)):
        options = kernels.SelectOptions(key_only={key_only}, tuning=tuning)
        kernels.select(store, 0, [0], [tokens], queries, [tokens // 2], options=options, threads=1)
print("read")
"""
    flags = ["-S"] if sys.flags.no_site else []
    ended = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env={**os.environ, "HERALD_CPU": tier},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stdout) == (0, "read\n"), ended.stderr


@pytest.mark.parametrize(
    ("queries", "group", "kind"),
    [
        (1, 8, "few"),
        (1, 15, "few"),
        (1, 16, "amx"),
        (2, 3, "few"),
        (2, 4, "amx"),
        (7, 1, "few"),
        (8, 1, "amx"),
        (32, 4, "amx"),
    ],
)
def test_several_queries_take_matrix_tiles_from_eight_rows_on_and_one_from_sixteen(queries, group, kind):
    tiers = {name: built for name, built, _usable in _core.tiers()}
    if not tiers["amx"]:
        pytest.skip("this build has no AMX")

    def chosen(dtype="bf16", head_dim=128, pv="auto"):
        return _core.kind_for(list(tiers).index("amx"), queries, group, DTYPES[dtype], head_dim, PV[pv])

    assert chosen() == kind
    without = "many" if queries * group >= 16 else "few"
    assert {chosen(dtype="fp16"), chosen(head_dim=40), chosen(pv="f32")} == {without}


def test_heads_that_end_a_queue_in_pieces_have_the_bits_of_whole_ones(tier):
    lengths = np.array([4100] * 6 + [9000, 0, 70])
    pool = filled_pool(rows=len(lengths), heads=2, length=9000)
    options = kernels.SelectOptions(keep_importance=True)
    whole = run(pool, lengths, lengths // 20, threads=1, options=options)
    for threads in (2, 4):  # 18 heads: pieces of some, pieces of 16
        pieces = run(pool, lengths, lengths // 20, threads=threads, options=options)
        for name in ("output", "indices", "counts", "status", "importance"):
            assert getattr(whole, name).tobytes() == getattr(pieces, name).tobytes(), (threads, name)


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (32, 8), (28, 4), (16, 4), (48, 2), (40, 2), (5, 5), (9, 3)])
def test_every_query_head_reads_its_own_kv_head(tier, heads, kv_heads):
    pool = kernels.PagedKV(1, 1, kv_heads, 70, 16, "fp32")
    own = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[None, :, None], (70, kv_heads, 16))
    pool.append(0, 0, 0, np.zeros_like(own), own.copy())
    queries = np.ones((1, 1, heads, 16), np.float32)
    found = kernels.select(pool, 0, [0], [70], queries, [3])
    expected = np.arange(heads) // (heads // kv_heads)
    np.testing.assert_allclose(found.output[0, 0], np.repeat(expected[:, None], 16, 1), rtol=1e-6)


def test_a_head_ratio_that_does_not_divide_is_refused():
    pool = filled_pool(heads=4)
    with pytest.raises(ConfigError, match="num_heads must be a multiple of num_kv_heads=4"):
        kernels.select(pool, 0, [0], [10], np.zeros((1, 1, 10, 64), np.float32), [1])


@pytest.mark.parametrize("length", [0, 1, 5, 249])
def test_a_budget_beyond_the_context_selects_everything(tier, length):
    found = run(filled_pool(rows=1), np.array([length]), np.array([2048]))
    assert found.counts.tolist() == [[length, length]]
    assert found.indices[0, 0].tolist() == list(range(length))


def test_no_keys_at_all_give_zeros_and_no_complaint(tier):
    found = run(filled_pool(rows=1), np.array([0]), np.array([5]))
    assert not found.output.any()
    assert not found.status.any()


def test_equal_importance_keeps_the_lower_positions(tier):
    pool = kernels.PagedKV(1, 1, 1, 500, 32, "fp32")
    pool.append(0, 0, 0, np.ones((500, 1, 32), np.float32), np.ones((500, 1, 32), np.float32))
    found = kernels.select(pool, 0, [0], [500], np.ones((1, 1, 4, 32), np.float32), [40])
    assert found.indices[0, 0].tolist() == list(range(40))


@pytest.mark.parametrize("x", [1, 8])
def test_one_spoiled_key_marks_its_own_head_only(tier, x):
    pool = filled_pool(rows=2, heads=2)
    pool.pages[0, 1, 1, 2, 0, 5, :] = 0x7FC0  # bf16 NaN in row 1, head 1
    found = run(pool, np.array([300, 300]), np.array([10, 10]), x=x, group=4)
    assert found.status.tolist() == [[0, 0], [0, 1]]
    assert np.isfinite(found.output[0]).all()
    assert found.indices[1, 1].tolist() == list(range(10))


def test_draft_rows_are_seen_but_never_selected(tier):
    pool, draft = filled_pool(rows=1), filled_pool(rows=1, length=33, seed=9)
    without = run(pool, np.array([100]), np.array([100]))
    seen = run(pool, np.array([100]), np.array([100]), draft=kernels.Draft(draft, [0], [33]))
    assert seen.indices.max() == 99
    assert np.abs(seen.output - without.output).max() > 1e-3


def test_positions_beyond_two_to_the_31_elements_are_reached(tier):
    pool = kernels.PagedKV(1, 64, 8, 65_536, 128)  # 17 GB of addresses, a few pages of memory
    assert pool.nbytes // 2 > 2**32
    rng = np.random.default_rng(0)
    k, v = (kernels.from_float32(rng.standard_normal((200, 8, 128)), "bf16") for _ in range(2))
    pool.append(0, 63, 65_000, k, v)
    found_k, _found_v = pool.read(0, 63, 65_000, 65_200)
    assert found_k.tobytes() == k.tobytes()
    small = kernels.PagedKV(1, 1, 8, 200, 128)
    small.append(0, 0, 0, k, v)
    pool.append(0, 63, 0, k, v)
    queries = rng.standard_normal((1, 1, 8, 128)).astype(np.float32)
    far = kernels.select(pool, 0, [63], [200], queries, [20])
    near = kernels.select(small, 0, [0], [200], queries, [20])
    assert far.output.tobytes() == near.output.tobytes()
    pool.close()


def test_importance_of_several_queries_is_the_sum_over_their_rows(tier):
    pool = filled_pool(rows=1, dtype="fp32")
    options = kernels.SelectOptions(keep_importance=True)
    queries = np.random.default_rng(5).standard_normal((1, 3, 4, 64)).astype(np.float32)
    together = kernels.select(pool, 0, [0], [300], queries, [20], options=options)
    parts = [
        kernels.select(pool, 0, [0], [300], queries[:, i : i + 1].copy(), [20], options=options).importance
        for i in range(3)
    ]
    np.testing.assert_allclose(together.importance, sum(parts), rtol=2e-5)
    np.testing.assert_allclose(together.importance.sum(-1), 6.0, rtol=1e-5)


def test_torch_tensors_are_taken_as_they_are(tier):
    pool = kernels.PagedKV(1, 1, 2, 64, 32)
    k, v = (torch.randn(40, 2, 32, dtype=torch.bfloat16) for _ in range(2))
    pool.append(0, 0, 3, k, v)
    stored, _ = pool.read(0, 0, 3, 43)
    assert torch.equal(torch.from_numpy(stored).view(torch.bfloat16), k)
    q = torch.randn(1, 1, 4, 32)
    found = kernels.select(pool, 0, torch.tensor([0]), torch.tensor([43]), q, torch.tensor([5]))
    out_k, out_v = (torch.empty(1, 2, 5, 32, dtype=torch.bfloat16) for _ in range(2))
    kernels.gather(pool, 0, [0], found, out_k, out_v)
    whole_k, _ = pool.read(0, 0, 0, 43)
    for head in range(2):
        expected = torch.from_numpy(whole_k[found.indices[0, head], head].copy()).view(torch.bfloat16)
        assert torch.equal(out_k[0, head], expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": [301 + 64]}, CapacityError, r"lengths\[0\] must be at least 0 and at most 320"),
        ({"lengths": [-1]}, ConfigError, r"lengths\[0\] must be at least 0"),
        ({"slots": [2]}, ConfigError, r"slots\[0\] must be at least 0 and at most 1"),
        ({"layer": 1}, ConfigError, "layer must be in 0..0, got 1"),
        ({"budget_tokens": [1.5]}, ConfigError, "budget_tokens must be 1 integers"),
        ({"queries": np.zeros((1, 1, 4, 32), np.float32)}, ConfigError, r"queries must be \[rows, x, num_heads, 64\]"),
        ({"queries": np.zeros((1, 1, 4, 64), np.int32)}, ConfigError, "queries must be floating point"),
        ({"threads": 0}, ConfigError, "threads must be >= 1"),
    ],
)
def test_a_bad_argument_is_named_with_its_value(change, error, message):
    arguments = {
        "layer": 0,
        "slots": [0],
        "lengths": [10],
        "queries": np.zeros((1, 1, 4, 64), np.float32),
        "budget_tokens": [3],
    } | change
    with pytest.raises(error, match=message):
        kernels.select(filled_pool(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"smoothing": 2}, "odd"),
        ({"pv": "int8"}, "unknown pv"),
        ({"smoothing": 0}, ">= 1"),
        ({"paper_like": True, "key_only": True}, "drop key_only"),
    ],
)
def test_a_bad_option_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        kernels.SelectOptions(**change)


def test_a_case_with_another_seed_is_another_case():
    """The comparison sees a difference: the result of one seed against the definition of another must fail."""
    case = Case((200,), (20,))
    other = replace(case, seed=1)
    assert run_case(case).output_error != run_case(other).output_error


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("key_only", [False, True])
def test_a_selection_that_gathers_leaves_what_a_gather_behind_it_would(tier, key_only, threads):
    """Whole units and split ones; rows of different lengths, an empty one, budgets of nothing and beyond a length."""
    pool, rng = filled_pool(rows=5, length=9000, seed=4), np.random.default_rng(9)
    queries = rng.standard_normal((5, 1, 4, 64)).astype(np.float32)
    place = (np.arange(5), np.array([9000, 0, 300, 4100, 700]), queries, np.array([450, 8, 0, 5000, 700]))
    options = kernels.SelectOptions(key_only=key_only)
    alone = kernels.select(pool, 0, *place, options=options, threads=threads)
    shape = (*alone.indices.shape, 64)
    apart, at_once = ([np.full(shape, 7, np.uint16) for _ in range(2)] for _ in range(2))
    kernels.gather(pool, 0, place[0], alone, *apart)
    found = kernels.select(pool, 0, *place, options=options, threads=threads, gathered=tuple(at_once))
    assert found.output.tobytes() == alone.output.tobytes()
    assert found.indices.tobytes() == alone.indices.tobytes()
    for one, other in zip(apart, at_once, strict=True):
        assert one.tobytes() == other.tobytes()
    pool.close()


def test_a_buffer_that_does_not_fit_the_selection_is_refused_before_it_runs():
    pool = filled_pool()
    small = tuple(np.zeros((2, 2, 4, 64), np.uint16) for _ in range(2))
    with pytest.raises(ConfigError, match=r"out_k must be contiguous, writable \[2, 2, 5, 64\], got \[2, 2, 4, 64\]"):
        run(pool, [300, 300], [5, 5], gathered=small)
    pool.close()


@pytest.mark.parametrize("key_only", [False, True])
def test_an_output_that_is_given_is_filled_as_one_that_is_made(tier, key_only):
    pool, lengths, options = filled_pool(), np.array([300, 0]), kernels.SelectOptions(key_only=key_only)
    made = run(pool, lengths, np.array([20, 20]), x=3, options=options)
    given = np.full(made.output.shape, np.nan, np.float32)
    found = run(pool, lengths, np.array([20, 20]), x=3, options=options, output=given)
    assert found.output is given
    assert given.tobytes() == made.output.tobytes()


@pytest.mark.parametrize("output", [np.zeros((2, 3, 4, 32), np.float32), np.zeros((2, 3, 4, 64))])
def test_an_output_of_another_shape_or_type_is_refused(output):
    with pytest.raises(ConfigError, match=r"output must be contiguous, writable float32 \[2, 3, 4, 64\]"):
        run(filled_pool(), np.array([300, 300]), np.array([5, 5]), x=3, output=output)
