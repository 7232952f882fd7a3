"""torch's two ways to do the same work: what the fused kernel is compared with.

``enable_gqa`` is left out on purpose: on CPUs it is some forty times slower than folding the group into query rows, and
no baseline.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .bandwidth import pool_read_gb_s
from .dispatch import set_tier, usable_tiers

if TYPE_CHECKING:
    from .measuring import KernelBench

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


#: Before every measured call of either side: the threads of the one before spin on, on the very CPUs of the next.
PAUSE_SECONDS = 0.05


def matmul_softmax_topk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: int) -> torch.Tensor:
    """bf16 matmul, fp32 softmax, sum over the group, top-k, bf16 matmul.

    Shapes: ``q`` ``[heads, rows, d]``, ``k`` and ``v`` ``[heads, S, d]``.
    """
    scores = torch.matmul(q, k.transpose(1, 2)).float()
    p = torch.softmax(scores * q.shape[-1] ** -0.5, dim=-1)
    found = torch.topk(p.sum(1), kept, dim=-1, sorted=False).indices
    torch.matmul(p.to(v.dtype), v)
    return found


def attention_and_scores_topk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: int) -> torch.Tensor:
    """Fused attention with the group as query rows, and scores again for the importance that it hides."""
    torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])
    p = torch.softmax(torch.matmul(q, k.transpose(1, 2)).float() * q.shape[-1] ** -0.5, dim=-1)
    return torch.topk(p.sum(1), kept, dim=-1, sorted=False).indices


def bench_torch(bench: "KernelBench", threads: int, repeats: int) -> list[dict[str, Any]]:
    """GB/s of both compositions and ours, alternating in one process, same bytes: x = 1, x = 1 on one thread, x = 32.

    With x = 1 a thread has eight (request, KV head) units to do, where there is room. ``limit`` is the most that any
    kernel which reads K and V could be faster: the read ceiling of the same round over torch's rate.
    """
    from .measuring import GROUP, HEAD_DIM, KV_HEADS, Variant

    ways: dict[str, Callable[..., torch.Tensor]] = {
        "matmul + softmax + topk": matmul_softmax_topk,
        "attention + scores + topk": attention_and_scores_topk,
    }
    requests = max(1, min(bench.rows // 2, 8 * threads // KV_HEADS))
    generator = torch.Generator().manual_seed(0)
    shape = (requests * KV_HEADS, bench.context, HEAD_DIM)
    all_k, all_v = (
        torch.randn(shape[1:], generator=generator).bfloat16().expand(shape).contiguous() for _ in range(2)
    )  # heads alike, each in its own memory: drawing all of them takes longer than the benchmark
    before = torch.get_num_threads()
    results = []
    try:
        for x, used in dict.fromkeys(((1, threads), (1, 1), (32, threads))):
            some = min(requests, max(1, (8 if x == 1 else 2) * used // KV_HEADS))
            heads = some * KV_HEADS
            k, v = all_k[:heads], all_v[:heads]
            nbytes = 2 * k.numel() * 2
            torch.set_num_threads(used)
            q = torch.randn(heads, x * GROUP, HEAD_DIM, generator=generator).bfloat16()
            ours = Variant("ours", usable_tiers()[-1], x, used)
            ceilings = []
            samples: dict[str, list[float]] = {name: [] for name in (*ways, "ours")}
            for repeat in range(min(repeats, 5) + 1):
                set_tier(ours.tier)
                ceilings.append(pool_read_gb_s(bench.pool, used))
                for name, way in ways.items():
                    time.sleep(PAUSE_SECONDS)
                    start = time.perf_counter()
                    way(q, k, v, bench.k)
                    if repeat:
                        samples[name].append(nbytes / (time.perf_counter() - start) / 1e9)
                time.sleep(PAUSE_SECONDS)
                seconds, _found = bench.run(ours, some)
                if repeat:
                    samples["ours"].append(some * bench.row_bytes / seconds / 1e9)
            mine = statistics.median(samples["ours"])
            for name in ways:
                rate = statistics.median(samples[name])
                results.append(
                    {
                        "name": f"{name}, x={x}" + (", one thread" if used < threads else ""),
                        "x": x,
                        "threads": used,
                        "requests": some,
                        "gb_s": rate,
                        "ours_gb_s": mine,
                        "ours_over_it": mine / rate,
                        "limit": statistics.median(ceilings[1:]) / rate,
                    }
                )
    finally:
        torch.set_num_threads(before)
    return results
