"""One forward by part: its graph, its kernels by name, the LM head; and its roofline sum. Attention's launch shapes."""

import time
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.bench import STEPS, Bench, timed_ms
from benchmarks.gpu.cells import Cell
from herald_exec import Options, decode
from herald_exec.cuda.actions import DeviceActions
from herald_exec.cuda.forward import launch_shape
from herald_exec.cuda.kernels.attention import attend_lanes
from herald_exec.cuda.lanes import Field, bucket
from herald_exec.execution import _session
from herald_exec.requests import DecodeRequest
from herald_pipeline import capacity
from herald_pipeline.pipeline import build


def open_step(bench: Bench, cell: Cell):
    """A session whose device pools hold synthetic KV, ready for steps; host pools are mapped and never touched."""
    pipeline = bench.pipeline(cell)
    size = capacity.request_size(pipeline, cell.context + 2 * pipeline.settings.block_length)
    options = Options(batch=cell.batch, synthetic_kv=True, ignore_eos=True, threads=bench.threads(cell))
    session = _session(pipeline, bench.model, size, bench.policy(bench.steps(cell)), options)
    for name in ("full", "exact", "sparse"):
        store = session.pools.stores.get(name)
        if store is not None:
            for layer in range(session.num_layers):
                if store.holds(layer):
                    for part in store.layer(layer):
                        part.normal_()
    return session, DeviceActions(session, graphs=bench.on_cuda)


def fill_lanes(session, actions, batch: int, context: int, drafting: bool) -> int:
    """The table of a full batch of open rows at block 1, all masked."""
    settings, table = session.pipeline.settings, actions.forward.table
    lanes = bucket(batch * (2 if drafting else 1))
    host = table._host[0]
    host.zero_()
    host[[Field.FULL_STORE_ROW, Field.SPARSE_STORE_ROW, Field.OUT_ROW]] = -1
    slots = torch.arange(batch, dtype=torch.int32).repeat(2 if drafting else 1)
    count = len(slots)
    host[Field.SLOT, :count] = host[Field.FULL_ROW, :count] = host[Field.SPARSE_ROW, :count] = slots
    host[Field.START, :count] = host[Field.FULL_LENGTH, :count] = context
    tail = settings.block_length if session.double_buffered else 0
    host[Field.SPARSE_LENGTH, :count] = settings.selected_tokens(context) + tail
    host[Field.IS_DRAFT, batch:count] = 1
    if drafting:
        host[Field.OUT_ROW, batch:count] = slots[batch:]
    table._turn = 0
    table.send()
    session.state.masked.fill_(value=True)
    return lanes


def accepted_tokens(bench: Bench, batch: int) -> torch.Tensor:
    """A block of each row as a short run of Dense accepts it ``[batch, B]``."""
    block = bench.shape.block_length
    requests = [DecodeRequest(i, (0,) * block, 2 * block) for i in range(batch)]
    options = Options(batch=batch, synthetic_kv=True, ignore_eos=True)
    dense = build(bench.shape, "dense", kv_dtype=bench.kv_dtype, dram_kv_dtype=bench.kv_dtype)
    answers = decode(dense, bench.model, requests, policy=bench.policy(min(STEPS, block)), options=options).answers
    return torch.tensor([answers[i][:block] for i in range(batch)])


def half_accepted(session, tokens: torch.Tensor, context: int) -> None:
    """Every other position of the blocks behind ``context`` holds its token, the others are masked.

    [MASK] tokens route alike: a step of nothing else reads fewer experts than those of a run do.
    """
    batch, block = tokens.shape
    session.state.tokens[:batch, context : context + block] = tokens.to(session.device)
    session.state.masked[:batch, context : context + block : 2] = False


def step(bench: Bench, cell: Cell, *, profiled: bool = True) -> dict[str, Any]:
    """One denoise step: graph, launches by name, LM head; and its roofline sum."""
    context, batch = cell.context, cell.batch
    session, actions = open_step(bench, cell)
    found: dict[str, Any] = {"batch": batch, "method": cell.what, "context": context}
    found["pool_bytes"] = session.pools.num_bytes
    stream = torch.cuda.Stream() if bench.on_cuda else None
    with torch.inference_mode(), torch.cuda.stream(stream):
        for drafting in (False, True) if session.pipeline.template.draft_step is not None else (False,):
            lanes = fill_lanes(session, actions, batch, context, drafting)
            start = time.perf_counter()
            actions.forward.capture(lanes)
            found[f"capture_s_{lanes}"] = time.perf_counter() - start
            times = timed_ms(bench, lambda n=lanes: actions.forward(n), repeats=8, warm=2)
            found["draft_forward_ms" if drafting else "forward_ms"] = {"median": median(times), "all": times}
        lanes = fill_lanes(session, actions, batch, context, False)
        normed = actions.forward(lanes)
        total = batch * session.block_length
        for name, count in (("full", total), ("half", max(1, total // 2))):
            head = timed_ms(bench, lambda n=count: actions.acceptance.head(normed[:n]), repeats=6, warm=2)
            found[f"head_ms_{name}"] = median(head)
        if profiled and bench.on_cuda:
            try:
                found["kernels"] = profile(lambda: actions.forward(lanes))
            except RuntimeError as problem:
                found["kernels"] = f"the profiler does not work here: {problem}"
    found["roofline"] = roofline(bench, session, cell)
    floor = found["roofline"].get("sum_ms")
    if floor:
        found["forward_over_roofline"] = found["forward_ms"]["median"] / floor
    session.pools.close()
    actions.close()
    return found


def profile(work) -> list[dict]:
    """Milliseconds of each kernel in three calls, per call, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
    rows = [(e.key, e.device_time_total / 3e3, e.count / 3) for e in seen.key_averages() if e.device_time_total > 0]
    rows.sort(key=lambda row: -row[1])
    return [{"name": name[:120], "ms": ms, "count": count} for name, ms, count in rows[:24]]


def roofline(bench: Bench, session, cell: Cell) -> dict[str, Any]:
    """Sum over parts of max(bytes / read rate, operations / GEMM rate), with the rates of the cell ``rates``."""
    known, batch, context = bench.known_rates(), cell.batch, cell.context
    if "hbm_copy_gb_s" not in known:
        return {"missing": "run the cell rates first"}
    shape, settings = session.model.shape, session.pipeline.settings
    tokens, moe = batch * session.block_length, shape.moe
    kv_entries = 0
    for layer in range(shape.num_layers):
        sparse = "sparse" in session.pools.stores and session.pools.stores["sparse"].holds(layer)
        prefix = settings.selected_tokens(context) + settings.block_length if sparse else context
        kv_entries += batch * (prefix + settings.block_length)
    kv_bytes = kv_entries * shape.kv_bytes_per_token_layer(settings.kv_dtype)
    attention_flops = 4 * kv_entries * settings.block_length * shape.num_heads * shape.head_dim
    weight_bytes = shape.weight_bytes() - shape.vocab_size * shape.hidden_size * 4
    expert_bytes = 0.0
    if moe is not None:
        # Every expert is hit at these batches; what few tokens would spare is not taken off.
        expert_bytes = shape.num_moe_layers * moe.num_experts * shape.expert_params * 2
    matmul_flops = 2 * tokens * (shape.active_params - shape.vocab_size * shape.hidden_size)
    # A step reads almost only; the faster of the two measured rates is the stricter floor.
    hbm = max(known["hbm_copy_gb_s"], known["hbm_read_gb_s"]) * 1e6
    gemm = known["gemm_tflop_s"] * 1e9
    parts = {
        "attention_ms": max(kv_bytes / hbm, attention_flops / gemm),
        "matmuls_ms": max(weight_bytes / hbm, matmul_flops / gemm),
    }
    return {
        **parts,
        "sum_ms": sum(parts.values()),
        "kv_bytes": kv_bytes,
        "weight_bytes": weight_bytes,
        "expert_bytes": expert_bytes,
        "matmul_flops": matmul_flops,
        "attention_flops": attention_flops,
    }


def attention(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Attention kernel at sparse and full lengths under several launch shapes."""
    shape, batch = bench.shape, cell.batch
    kv, dim, group, block = shape.num_kv_heads, shape.head_dim, shape.group_size, shape.block_length
    make = {"device": bench.device, "dtype": torch.bfloat16}
    q = torch.randn(batch, kv, block * group, dim, **make)
    own = tuple(torch.randn(batch, kv, block, dim, **make) for _ in "kv")
    rows = torch.arange(batch, device=bench.device, dtype=torch.int32)
    found = {}
    for length in (int(0.05 * cell.context) + 32, cell.context):
        keys, values = (torch.randn(batch, kv, length + 64, dim, **make) for _ in "kv")
        lengths = torch.full_like(rows, length)
        now = launch_shape(batch * kv, length)["splits"]
        cuts = dict.fromkeys((now, 1, 2, 3, 4, 6)) if length == cell.context else dict.fromkeys((now, 1, 2))
        shapes = [(splits, 128, 64, 8, 3) for splits in cuts]
        shapes += [(now, 128, 64, 8, 4), (now, 128, 128, 8, 3), (now, 128, 32, 8, 4), (now, 64, 64, 4, 3)]
        for splits, block_m, block_n, warps, stages in shapes:
            options = {
                "splits": splits,
                "block_m": block_m,
                "block_n": block_n,
                "num_warps": warps,
                "num_stages": stages,
            }
            name = f"{length}: splits {splits}, rows {block_m}, keys {block_n}, warps {warps}, stages {stages}"
            try:
                times = timed_ms(
                    bench, lambda k=keys, v=values, n=lengths, o=options: attend_lanes(q, k, v, own, rows, n, **o), 6, 2
                )
            except Exception as problem:
                found[name] = f"{type(problem).__name__}: {str(problem)[:160]}"
                continue
            moved = 2 * batch * kv * (length + block) * dim * 2
            found[name] = {"ms": median(times), "kv_tb_s": moved / median(times) / 1e9}
        # A draft step: two lanes a row, side by side or far apart.
        twice = [torch.cat([part, part]) for part in (q, *own, rows, lengths)]
        now = launch_shape(2 * batch * kv, length)["splits"]
        for paired, splits in dict.fromkeys(((False, now), (True, now), (True, 1), (True, 2))):
            shaped = {"paired": paired, "splits": splits}
            times = timed_ms(
                bench,
                lambda k=keys, v=values, t=twice, o=shaped: attend_lanes(t[0], k, v, (t[1], t[2]), t[3], t[4], **o),
                6,
                2,
            )
            moved = 2 * batch * kv * (length + block) * dim * 2
            found[f"{length}: draft step, paired {paired}, splits {splits}"] = {
                "ms": median(times),
                "kv_tb_s": moved / median(times) / 1e9,
            }
    return found
