"""Each Triton kernel equals the same thing written plainly in float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with the CUDA builds of PyTorch")

from herald_exec.cuda.forward import launch_shape
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.kernels.experts import join_experts, permute_tokens, route_tokens, split_router
from herald_exec.cuda.kernels.head import Head
from herald_exec.cuda.kernels.norms import add_norm, silu_mul
from herald_exec.cuda.kernels.placing import place_heads
from herald_exec.models.layers import rotary_table, route
from herald_pipeline.model import MoeShape

EPS = 1e-6
# The interpreter turns loop bounds into numbers in a way that newer numpy versions warn about.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")


def error(found, wanted):
    """Relative error in the 2-norm; NaN never passes."""
    difference = (found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm().cpu()
    return difference.item()


def norm64(x, weight):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def normal(*dims, device, seed=0):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("size", [64, 96, 2048])
def test_residual_and_norm_are_those_of_the_definition(size, device):
    hidden, delta, weight = (normal(*d, device=device, seed=s) for s, d in enumerate([(5, size), (5, size), (size,)]))
    joined, normed = add_norm(hidden, delta, weight, EPS)
    assert error(joined, hidden.double() + delta.double()) < 1e-6
    assert error(normed, norm64(hidden + delta, weight)) < 1e-6
    same, alone = add_norm(hidden, None, weight, EPS)
    assert same is hidden
    assert error(alone, norm64(hidden, weight)) < 1e-6


@pytest.mark.parametrize("size", [48, 1500])
def test_silu_times_up_is_that_of_the_definition(size, device):
    gate_up = normal(7, 2 * size, device=device)
    gate, up = gate_up.double().chunk(2, -1)
    assert error(silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up) < 1e-6


def turn64(x, positions, rotary_dim, theta):
    """RoPE, pair by pair, of [N, heads, d]."""
    out = x.double().clone()
    half = rotary_dim // 2
    for i in range(half):
        angle = positions.double() / theta ** (2 * i / rotary_dim)
        c, s = angle.cos()[:, None], angle.sin()[:, None]
        low, high = x[..., i].double(), x[..., i + half].double()
        out[..., i], out[..., i + half] = low * c - high * s, high * c + low * s
    return out


@pytest.mark.parametrize(("fraction", "norm"), [(1.0, True), (0.5, True), (1.0, False)])
def test_heads_are_normed_turned_and_put_where_they_are_read(fraction, norm, device):
    lanes, block, heads, kv, dim = 3, 8, 6, 2, 32
    group, tokens = heads // kv, lanes * block
    joined = normal(tokens, (heads + 2 * kv) * dim, device=device)
    q_norm, k_norm = (normal(dim, device=device, seed=s) if norm else None for s in (1, 2))
    positions = torch.arange(tokens, device=device) * 7
    rotary = rotary_table(positions, int(dim * fraction), 1e4)
    pool_k, pool_v = (torch.full((4, kv, 20, dim), 9.0, device=device) for _ in "kv")
    out_k, out_v = (torch.full((5, kv, block, dim), 9.0, device=device) for _ in "kv")
    rows, starts = torch.tensor([2, -1, 0], device=device).int(), torch.tensor([12, 0, 3], device=device).int()
    leaving = torch.tensor([-1, 4, 1], device=device).int()
    q, own_k, own_v = place_heads(
        joined, q_norm, k_norm, rotary, EPS, lanes, (heads, kv), (pool_k, pool_v, rows, starts), (out_k, out_v, leaving)
    )
    split = joined.view(tokens, -1, dim)
    wanted = []
    for part, weight in ((split[:, :heads], q_norm), (split[:, heads : heads + kv], k_norm)):
        normed = norm64(part, weight) if norm else part.double()
        wanted.append(turn64(normed, positions, int(dim * fraction), 1e4).view(lanes, block, -1, dim))
    wanted.append(split[:, heads + kv :].double().view(lanes, block, kv, dim))
    for lane in range(lanes):
        for h in range(heads):
            found = q[lane, h // group].view(block, group, dim)[:, h % group]
            assert error(found, wanted[0][lane, :, h]) < 1e-5
    for own, part in ((own_k, wanted[1]), (own_v, wanted[2])):
        assert error(own, part.transpose(1, 2)) < 1e-5
    for lane, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        if row >= 0:
            assert torch.equal(pool_k[row, :, start : start + block], own_k[lane])
            assert torch.equal(pool_v[row, :, start : start + block], own_v[lane])
    assert (pool_k == 9.0).sum() == (4 * 20 - 2 * block) * kv * dim
    assert torch.equal(out_k[4], own_k[1])
    assert torch.equal(out_v[1], own_v[2])
    assert (out_v == 9.0).sum() == 3 * kv * block * dim


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("block", "group", "dim"), [(8, 2, 16), (32, 4, 32), (4, 1, 64), (1, 4, 16)])
def test_attention_of_ragged_lanes_is_one_softmax_over_prefix_and_block(splits, block, group, dim, device):
    lengths = [0, 1, 31, 64, 70, 200]
    lanes, kv, rows = len(lengths), 2, 8
    q = normal(lanes, kv, block * group, dim, device=device)
    keys, values = (normal(rows, kv, 210, dim, device=device, seed=s) for s in (1, 2))
    own = tuple(normal(lanes, kv, block, dim, device=device, seed=s) for s in (3, 4))
    places = torch.tensor([7, 0, 3, 1, 2, 6], device=device).int()
    out = attend_lanes(
        q, keys, values, own, places, torch.tensor(lengths, device=device).int(), splits=splits, block_n=32
    )
    out = out.view(lanes, block, kv, group, dim)
    for lane, (row, length) in enumerate(zip(places.tolist(), lengths, strict=True)):
        for h in range(kv):
            k = torch.cat([keys[row, h, :length], own[0][lane, h]]).double()
            v = torch.cat([values[row, h, :length], own[1][lane, h]]).double()
            weights = (q[lane, h].double() @ k.T / dim**0.5).softmax(-1)
            assert error(out[lane, :, h].reshape(-1, dim), weights @ v) < 1e-5


def test_lanes_side_by_side_give_the_same_bits(device):
    """``paired`` changes the order of the programs and nothing else."""
    lanes, kv, block, group, dim = 6, 2, 4, 4, 16
    q = normal(lanes, kv, block * group, dim, device=device)
    keys, values = (normal(3, kv, 70, dim, device=device, seed=s) for s in (1, 2))
    own = tuple(normal(lanes, kv, block, dim, device=device, seed=s) for s in (3, 4))
    rows, lengths = (torch.tensor(part * 2, device=device).int() for part in ([2, 0, 1], [64, 0, 33]))
    apart, paired = (
        attend_lanes(q, keys, values, own, rows, lengths, paired=together, splits=2, block_n=32)
        for together in (False, True)
    )
    assert torch.equal(apart, paired)


MOES = [
    MoeShape(8, 2, 32, num_shared_experts=1, num_groups=2, groups_per_token=1, gate="sigmoid"),
    MoeShape(64, 8, 32, num_groups=8, groups_per_token=4, gate="sigmoid", routed_scaling=2.5),
    MoeShape(16, 3, 32, gate="softmax", normalise_weights=False),
]


@pytest.mark.parametrize("moe", MOES)
def test_routing_and_permutation_are_the_plain_ones(moe, device):
    tokens = 33
    logits = normal(tokens, moe.num_experts, device=device)
    bias = 0.3 * normal(moe.num_experts, device=device, seed=1) if moe.gate == "sigmoid" else None
    counts = torch.zeros(moe.num_experts, dtype=torch.int32, device=device)
    experts, weights, ranks = route_tokens(logits, bias, moe, counts)
    plain_experts, plain_weights = route(logits.double(), None if bias is None else bias.double(), moe)
    order = experts.argsort(-1)
    plain = plain_experts.argsort(-1)
    assert torch.equal(experts.gather(1, order).long(), plain_experts.gather(1, plain))
    assert error(weights.gather(1, order), plain_weights.gather(1, plain)) < 1e-6
    assert torch.equal(counts.long(), torch.bincount(plain_experts.flatten(), minlength=moe.num_experts))
    x = normal(tokens, 48, device=device, seed=2)
    permuted, places, ends = permute_tokens(x, experts, ranks, counts)
    assert torch.equal(ends.long(), counts.long().cumsum(0))
    assert sorted(places.flatten().tolist()) == list(range(tokens * moe.experts_per_token))
    starts = ends - counts
    for token in range(tokens):
        for expert, place in zip(experts[token].tolist(), places[token].tolist(), strict=True):
            assert starts[expert] <= place < ends[expert]
            assert torch.equal(permuted[place], x[token])


@pytest.mark.parametrize("with_shared", [True, False])
def test_experts_are_summed_with_their_weights_and_the_counters_are_free_again(with_shared, device):
    tokens, taken, size = 9, 3, 96
    expert_out = normal(tokens * taken, size, device=device)
    shuffled = torch.randperm(tokens * taken, generator=torch.Generator().manual_seed(1))
    places = shuffled.view(tokens, taken).to(device).int()
    weights, hidden = normal(tokens, taken, device=device, seed=2), normal(tokens, size, device=device, seed=3)
    shared, norm = normal(tokens, size, device=device, seed=4), normal(size, device=device, seed=5)
    counts = torch.full((16,), 7, dtype=torch.int32, device=device)
    joined, normed = join_experts(
        expert_out, places, weights, shared if with_shared else None, hidden, norm, EPS, counts
    )
    wanted = hidden.double() + (expert_out.double()[places.long()] * weights.double()[..., None]).sum(1)
    wanted = wanted + shared.double() if with_shared else wanted
    assert error(joined, wanted) < 1e-6
    assert error(normed, norm64(joined, norm)) < 1e-6
    assert not counts.any()


def test_a_router_in_three_bf16_parts_is_the_fp32_router():
    router = normal(16, 64, device="cpu")
    parts = split_router(router, torch.bfloat16)
    assert parts.dtype is torch.bfloat16
    assert error(parts.double().view(3, 16, 64).sum(0), router) < 2e-7
    assert split_router(router, torch.float32) is router


@pytest.mark.parametrize("chunk", [64, 100, 1000])
def test_the_head_gives_argmax_and_softmax_without_the_forbidden_token(chunk, device):
    weight, normed = normal(300, 32, device=device), normal(11, 32, device=device, seed=1)
    logits = normed.double() @ weight.double().T
    forbidden = int(logits[0].argmax())
    token, confidence = Head(weight, 16, forbidden, chunk)(normed)
    allowed = logits.clone()
    allowed[:, forbidden] = -torch.inf
    assert torch.equal(token, allowed.argmax(-1))
    assert error(confidence, logits.softmax(-1).gather(1, token[:, None])[:, 0]) < 1e-5


@pytest.mark.parametrize("pairs", [4, 96, 152, 320, 640])
@pytest.mark.parametrize("keys", [100, 1702, 32800])
def test_a_launch_is_cut_so_that_its_waves_are_no_longer_than_uncut(pairs, keys):
    splits = launch_shape(pairs, keys)["splits"]
    assert 1 <= splits <= max(1, keys // 256)
    waves = [-(-pairs * cut // 132) * keys / cut for cut in (1, splits)]
    assert waves[1] <= waves[0]
    assert launch_shape(4, 32800)["splits"] == 32


def test_tiles_are_large_where_a_program_reads_many_keys_alone():
    assert launch_shape(320, 32800) == {"splits": 2, "block_n": 128}
    assert launch_shape(320, 1702)["block_n"] == 64
    assert launch_shape(4, 32800)["block_n"] == 64


@pytest.mark.parametrize("length", [100, 300])
def test_large_tiles_give_what_small_ones_give(length, device):
    kv, block, group, dim = 1, 32, 4, 32
    half = {"device": device, "dtype": torch.bfloat16}
    q = normal(2, kv, block * group, dim, device=device).to(**half)
    keys, values = (normal(2, kv, 320, dim, device=device, seed=seed).to(**half) for seed in (1, 2))
    own = tuple(normal(2, kv, block, dim, device=device, seed=seed).to(**half) for seed in (3, 4))
    rows, lengths = (torch.tensor(part, dtype=torch.int32, device=device) for part in ((0, 1), (length, length - 3)))
    small, large = (attend_lanes(q, keys, values, own, rows, lengths, block_n=n) for n in (16, 128))
    assert error(large, small.double()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_host_pages_reach_their_places_and_nothing_else_is_written(dtype, device):
    """Ragged counts, rows in any order; the pages are page-locked where there is a GPU."""
    from herald_exec.cuda.kernels.rows import fetch_rows

    slots, heads, pages, dim, capacity = 3, 2, 3, 16, 80
    held = normal(2, slots, heads, pages, 2, 64, dim, device="cpu").to(dtype)
    if device.type == "cuda":
        held = held.pin_memory()
    counts, places, chosen_slots = [70, 33, 0], [4, 0, 1], [2, 0, 1]
    indices = torch.full((3, heads, 70), -1, dtype=torch.int32)
    draw = torch.Generator().manual_seed(3)
    for row, count in enumerate(counts):
        for head in range(heads):
            indices[row, head, :count] = torch.randperm(pages * 64, generator=draw)[:count].sort().values
    told = torch.tensor([chosen_slots, places, counts], dtype=torch.int32, device=device)
    out = [torch.full((5, heads, capacity, dim), 7.0, dtype=dtype, device=device) for _ in "kv"]
    strides = [stride * held.element_size() for stride in held.stride()]
    fetch_rows(held.data_ptr() + strides[0], told, indices.to(device), tuple(out), strides[1], strides[2])
    for which, found in enumerate(out):
        wanted = torch.full_like(found, 7.0)
        for row, count in enumerate(counts):
            for head in range(heads):
                flat = held[1, chosen_slots[row], head, :, which].reshape(-1, dim)
                wanted[places[row], head, :count] = flat[indices[row, head, :count].long()].to(device)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_speculated_weights_are_softmaxes_over_each_prefix_summed_over_queries(dtype, device):
    """Ragged prefixes in rows of any order, over several tiles; an empty lane; columns that no power of 2 counts."""
    if dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bf16 numbers")
    from herald_exec.cuda.kernels.importance import TILE, TILES, prefix_importance

    capacity, scale = TILE * TILES + 40, 0.3
    queries = normal(3, 2, 12, 19, device=device).to(dtype)
    keys = normal(4, 2, 19, capacity, device=device, seed=1).to(dtype)
    rows, lengths = [2, 0, 3], [TILE * TILES + 5, 77, 0]
    told = [torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, lengths)]
    found = prefix_importance(queries, keys, *told, scale)
    for lane, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        scores = queries[lane].double() @ keys[row, :, :, :length].double() * scale
        wanted = torch.softmax(scores, dim=-1).sum(dim=1)
        assert length == 0 or error(found[lane, :, :length], wanted) < 1e-5
        assert (found[lane, :, length:] == -1).all()


def picked(weights, lengths, counts, most):
    """What :func:`pick_largest` writes, after it was given nonsense to write over."""
    from herald_exec.cuda.kernels.picking import pick_largest

    told = [torch.tensor(values, dtype=torch.int32, device=weights.device) for values in (lengths, counts)]
    out = torch.full((*weights.shape[:2], most), 77, dtype=torch.int32, device=weights.device)
    pick_largest(weights, *told, out)
    return out.cpu().numpy()


def picked_plainly(weights, lengths, counts, most):
    """By a stable sort of each prefix: NaN first, larger before smaller, of equal ones the lower position."""
    out = np.full((*weights.shape[:2], most), -1, np.int32)
    for lane, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for head, row in enumerate(weights[lane, :, :length].cpu().double().numpy()):
            order = np.lexsort((np.arange(length), -np.nan_to_num(row, nan=0.0), ~np.isnan(row)))
            out[lane, head, : min(count, length)] = np.sort(order[:count])
    return out


@pytest.mark.parametrize("capacity", [100, 1000, 8192 + 300])
def test_the_largest_weights_of_ragged_prefixes_are_picked_in_ascending_order(capacity, device):
    """An empty lane, a whole prefix, one position, and larger weights behind a prefix."""
    lengths, counts = [capacity, capacity - 37, 0, 64, capacity], [capacity // 20, 30, 0, 64, 1]
    weights = normal(5, 2, capacity, device=device).exp()
    for lane, length in enumerate(lengths):
        weights[lane, :, length:] = 1e9
    most = max(counts) + 3
    assert (picked(weights, lengths, counts, most) == picked_plainly(weights, lengths, counts, most)).all()


@pytest.mark.parametrize("distinct", [1, 2, 7])
def test_of_equal_weights_the_lower_positions_are_picked(distinct, device):
    """Ties across the tiles of a program."""
    drawn = torch.randint(distinct, (2, 2, 9000), generator=torch.Generator().manual_seed(2))
    weights, lengths, counts = drawn.float().to(device) / 8, [9000, 8700], [8500, 4000]
    found = picked(weights, lengths, counts, 8500)
    assert (found == picked_plainly(weights, lengths, counts, 8500)).all()


def test_weights_of_every_sign_and_kind_are_ordered(device):
    """NaN of either sign above infinity, -inf below all, both zeros alike, numbers that share all but the last bit."""
    kinds = torch.tensor([0.0, -0.0, 1e-42, -1e-42, torch.inf, -torch.inf, torch.nan, -torch.nan, 1.0, -1.0, -3e38])
    drawn = torch.randint(len(kinds), (1, 1, 600), generator=torch.Generator().manual_seed(4))
    close = torch.full((1, 1, 600), 0.1).view(torch.int32) + torch.arange(600) % 256
    for values in (kinds[drawn], close.view(torch.float32)):
        for count in (1, 50, 100, 333, 599, 600):
            found = picked(values.contiguous().to(device), [600], [count], 600)
            assert (found == picked_plainly(values, [600], [count], 600)).all(), count


def test_more_positions_than_a_prefix_has_are_all_of_them(device):
    weights = normal(1, 1, 40, device=device)
    assert picked(weights, [9], [12], 12).tolist() == [[[*range(9), -1, -1, -1]]]
