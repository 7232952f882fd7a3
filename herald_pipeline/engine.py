"""Engines: what a serving program makes of a machine, in overheads, efficiencies and memory that it keeps for itself.

:mod:`herald_pipeline.hardware` has the machine, and the profile that holds one of each.
"""

# ruff: noqa: RUF009 - _quantity makes the field itself, so that unit and measurer stand beside the name

from dataclasses import dataclass

from herald_pipeline.quantities import Quantity
from herald_pipeline.quantities import quantity_field as _quantity


@dataclass(frozen=True, slots=True)
class Engine:
    """What a serving program makes of a machine.

    Attributes
    ----------
    layer_overhead_us
        Fixed time per layer and forward: launch gaps, norms, small kernels.
    retrieval_layer_overhead_us
        The same per layer of the retrieval's device part. Absent: ``layer_overhead_us``.
    retrieval_project_share
        How much of a retrieval layer's fixed time its projection carries (norms, rotation, the queries' way to the
        host); output projection and feed-forward carry the rest. Absent: half of ``retrieval_layer_overhead_us``, all
        of ``layer_overhead_us``.
    exchange_project_us, exchange_finish_us
        What a stage of a pass for which the steps wait takes, besides products and bytes, that hands a layer's queries
        to the CPU, and that takes the outputs back (curves over query tokens). Absent: ``layer_overhead_us``.
    stage_overhead_us, select_overhead_us, gather_overhead_us, h2d_overhead_us, d2h_overhead_us
        Host time per launch of a stage (on a GPU of those alone that wait for the host: the others' launches are issued
        ahead), and on top of it per layer of a CPU selection, per gather, and per launch of a
        copy stream (the last two: curves over the bytes of the launch, where they grow with its requests). Absent:
        contained in the overheads above.
    weight_read_efficiency, attention_efficiency
        Share of ``gpu.bandwidth_gb_s`` at which weights and KV are read.
    gemm_efficiency, grouped_gemm_efficiency
        Share of ``gpu.peak_tflop_s`` of dense products and of the experts' grouped ones (curves over token rows).
    grouped_gemm_tile_rows
        Rows to which the tokens of every expert that is hit are padded.
    routed_token_share
        Effective share of tokens that route independently: [MASK] tokens route alike, so fewer experts are hit.
    first_step_experts_share
        Time of the experts in a block's first step over that of its other steps, at most 1 (curve over token rows): all
        that it holds is [MASK], which hits fewer experts. It holds for passes that are a block's first step by
        themselves; steps of one launch have it in their mean. Absent: 1.
    attention_flops_efficiency
        Share of ``gpu.peak_tflop_s`` of attention's products (curve over KV bytes per query token, which grow with
        the prefix), where they and not the reading decide: on a CPU core that plays the GPU. Absent:
        ``gemm_efficiency``.
    lane_padding
        Lanes (blocks) for which a step is launched over those that it has, by lanes: an engine with a graph for some
        numbers of lanes alone forwards padding with the others. Absent: 1.
    top_k_efficiency
        Share of ``gpu.bandwidth_gb_s`` of selecting by importance on the GPU, over the bytes of one request's scores
        (two fp32 passes): importance by the block's queries, top-k and the gather. Absent: ``attention_efficiency``.
    proxy_efficiency
        Share of ``gpu.bandwidth_gb_s`` at which a proxy's whole stage passes over its partial keys: projection, scores,
        and what picks by them (curve over those bytes). Absent: scores and top-k by the two shares above.
    sampler_passes
        fp32 passes over the logits, per forwarded token.
    head_efficiency
        Share of ``gpu.peak_tflop_s`` that LM head and choice reach together (curve over the positions that they see).
        Absent: the product by ``gemm_efficiency``, the choice by ``sampler_passes``.
    head_token_share
        Share of an open block's positions that head and sampler see, mean over its steps: an engine may leave out
        those that hold a token already. Absent: all of them.
    acceptance_us
        Time on the device from the head's choice to accepted tokens, a few dozen small kernels.
        Absent: contained in the experts' time, which is what is left of a step.
    decide_overhead_us
        Host time between two steps: what a step decided is read and the next one issued (curve over requests).
        Absent: contained in the overheads above.
    streamed_copy_efficiency, scattered_copy_efficiency
        Share of the link's rate of layer-wise copies beside selection, and of copies picked row by row.
    row_fetch_efficiency
        Share of the link's rate at which the device reads selected rows of host memory itself (``gather=gpu``).
    constant_load_efficiency
        Time of work on the device with rests over its time where it never rests: a card at its power limit lowers its
        clock (curve over token rows). It holds for methods that leave the device no rest, and not for experts: their
        rate is that of a run's steps, which follow one another. Absent: 1.
    constant_load_efficiency_sparse
        The same of steps over selected entries, which take less power than full attention. Absent:
        ``constant_load_efficiency``.
    select_dram_efficiency, select_flops_efficiency
        Share of ``dram.read_gb_s`` of the selection kernel's pass over the KV, and share of
        ``cpu.attention_tflop_s`` of its work per query (score store and top-k included). The two times add up.
    select_size_cost
        How many times as long a selection's work takes with more than one query as ``select_flops_efficiency`` has it,
        which is of the largest selections (curve over the KV bytes read): few requests leave threads without a head of
        their own, which then share one. What one query loses to size is in ``select_dram_efficiency``. Absent: 1.
    select_keys_dram_efficiency, select_int8_dram_efficiency
        The first of these for selection by keys alone and over 8-bit keys. Absent: ``select_dram_efficiency``.
    gather_dram_efficiency
        Share of ``dram.read_gb_s`` of collecting the selected rows.
    fused_gather_dram_efficiency
        The same of a selection's own workers (``gather=fused``): over the time that it adds to the selection.
    copy_beside_cost, gather_beside_cost
        What a scan loses to a byte that the upload, or the gather, moves beside it, over the time of a byte at
        ``dram.read_gb_s``: below 1 where cores and not memory bound that rate, above where the copy takes its cores
        too. Absent: 1.
    gather_beside_scan, copy_beside_scan, row_fetch_beside_scan, down_beside_scan
        How many times as long a gather, an upload, rows that the device reads itself, and a launch that brings KV to
        the host take while a selection runs (curves over their bytes). Absent: 1.
    step_beside_row_fetch, proxy_beside_row_fetch, row_fetch_beside_step
        Where the device fetches rows by a stream of high priority, whose programs hold multiprocessors: how many times
        as long, at least 1, a forward's stage (curve over token rows) and a proxy's (over the bytes of its partial
        keys) take while a fetch is under way, and a fetch (over its bytes) while kernels are. Absent: 1, and of a proxy
        as of a step.
    turn_wait_share
        Of the main stream's kernel under way, the share for which a kernel of a high-priority stream waits: it gets
        room as blocks of the other end, not when all have. Absent: 1.
    kernels_per_layer, retrieval_kernels_per_layer
        Kernel launches per layer of a denoise forward, and of the retrieval's GPU part: the latter's take turns with
        the former's. Contention follows from these counts.
    block_us
        Most time of a thread block of a forward's kernels: a kernel of a priority stream gets its place when a block
        ends, so it waits no longer. For machines on which nobody timed that wait: ``turn_wait_share``, where stated, is
        taken alone. Absent: it waits until the whole kernel has ended.
    usable_memory_share
        Share of the device memory that weights, pools and logits may fill; the rest is the runtime's.
    runtime_gb
        Device memory that the runtime takes before the first allocation. Absent: contained in the share above.
    logit_bytes
        Bytes held per logit of the active blocks.
    """

    name: str = ""
    title: str = ""
    layer_overhead_us: Quantity | None = _quantity("us", "launch")
    retrieval_layer_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    retrieval_project_share: Quantity | None = _quantity("share", "launch", optional=True)
    exchange_project_us: Quantity | None = _quantity("us", "launch", optional=True)
    exchange_finish_us: Quantity | None = _quantity("us", "launch", optional=True)
    stage_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    select_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    gather_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    h2d_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    d2h_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    weight_read_efficiency: Quantity | None = _quantity("share", "gemm")
    gemm_efficiency: Quantity | None = _quantity("share", "gemm")
    grouped_gemm_efficiency: Quantity | None = _quantity("share", "grouped-gemm", "experts")
    grouped_gemm_tile_rows: Quantity | None = _quantity("rows", "grouped-gemm", "experts")
    routed_token_share: Quantity | None = _quantity("share", "grouped-gemm", "experts")
    attention_efficiency: Quantity | None = _quantity("share", "attention")
    first_step_experts_share: Quantity | None = _quantity("share", "grouped-gemm", optional=True)
    attention_flops_efficiency: Quantity | None = _quantity("share", "attention", optional=True)
    lane_padding: Quantity | None = _quantity("x", "launch", optional=True)
    top_k_efficiency: Quantity | None = _quantity("share", "selection", optional=True)
    proxy_efficiency: Quantity | None = _quantity("share", "proxy", optional=True)
    sampler_passes: Quantity | None = _quantity("passes", "sampler")
    head_efficiency: Quantity | None = _quantity("share", "sampler", optional=True)
    head_token_share: Quantity | None = _quantity("share", "launch", optional=True)
    acceptance_us: Quantity | None = _quantity("us", "proxy", optional=True)
    decide_overhead_us: Quantity | None = _quantity("us", "launch", optional=True)
    streamed_copy_efficiency: Quantity | None = _quantity("share", "copies", "streamed")
    scattered_copy_efficiency: Quantity | None = _quantity("share", "copies", "scattered")
    row_fetch_efficiency: Quantity | None = _quantity("share", "gather", "rows")
    constant_load_efficiency: Quantity | None = _quantity("share", "load", optional=True)
    constant_load_efficiency_sparse: Quantity | None = _quantity("share", "load", optional=True)
    select_dram_efficiency: Quantity | None = _quantity("share", "selection", "select", "select_keys", "select_int8")
    select_flops_efficiency: Quantity | None = _quantity("share", "selection", "select", "select_keys", "select_int8")
    select_size_cost: Quantity | None = _quantity("x", "selection", optional=True)
    select_keys_dram_efficiency: Quantity | None = _quantity("share", "selection", optional=True)
    select_int8_dram_efficiency: Quantity | None = _quantity("share", "selection", optional=True)
    gather_dram_efficiency: Quantity | None = _quantity("share", "gather", "gather")
    fused_gather_dram_efficiency: Quantity | None = _quantity("share", "gather", "gather_fused")
    copy_beside_cost: Quantity | None = _quantity("x", "contention", optional=True)
    gather_beside_cost: Quantity | None = _quantity("x", "contention", optional=True)
    gather_beside_scan: Quantity | None = _quantity("x", "contention", optional=True)
    copy_beside_scan: Quantity | None = _quantity("x", "contention", optional=True)
    row_fetch_beside_scan: Quantity | None = _quantity("x", "contention", optional=True)
    down_beside_scan: Quantity | None = _quantity("x", "contention", optional=True)
    step_beside_row_fetch: Quantity | None = _quantity("x", "contention", optional=True, minimum=1.0)
    proxy_beside_row_fetch: Quantity | None = _quantity("x", "contention", optional=True, minimum=1.0)
    row_fetch_beside_step: Quantity | None = _quantity("x", "contention", optional=True, minimum=1.0)
    turn_wait_share: Quantity | None = _quantity("share", "contention", optional=True)
    kernels_per_layer: Quantity | None = _quantity("kernels", "launch")
    retrieval_kernels_per_layer: Quantity | None = _quantity("kernels", "launch", "select")
    block_us: Quantity | None = _quantity("us", "gemm", optional=True)
    usable_memory_share: Quantity | None = _quantity("share", "memory")
    runtime_gb: Quantity | None = _quantity("GB", "memory", optional=True)
    logit_bytes: Quantity | None = _quantity("B", "memory")
