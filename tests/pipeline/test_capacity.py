"""What fits, against sums done by hand, the papers' batches, and a slow search."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herald_pipeline import capacity, catalogue, hardware_io, methods, published
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.model import KVDtype
from herald_pipeline.pipeline import build
from herald_pipeline.pools import Home
from herald_pipeline.workload import Workload

H100 = hardware_io.resolve("h100-sxm-80g_xeon-8481c")
MEMORY = Memory.of(H100)
GENERATED = 512
"""Tokens that the paper's runs reserve behind the context (its longest answer)."""


def table_2_batch(method, model, context):
    point = {"exhibit": "Table II", "metric": "peak_batch", "model_name": model, "context_tokens": context}
    return published.number(**point, method_name=method)


def largest(method, model, context):
    return capacity.largest_batch(build(catalogue.get(model), method), context + GENERATED, MEMORY)


@pytest.mark.parametrize("model", ["llada2-mini", "sdar-8b"])
@pytest.mark.parametrize("context", [16384, 32768])
def test_the_paper_s_dense_batches_come_out_exactly(model, context):
    assert largest("dense", model, context) == table_2_batch("dense", model, context)


@pytest.mark.parametrize("context", [16384, 32768])
def test_the_paper_s_herald_batches_on_llada_come_out_within_8_percent(context):
    assert largest("herald", "llada2-mini", context) == pytest.approx(
        table_2_batch("herald", "llada2-mini", context), rel=0.08
    )


def test_the_items_of_dense_are_the_sums_done_by_hand():
    budget = capacity.budget(build(catalogue.get("llada2-mini"), "dense"), 33_280, 16, MEMORY)
    items = {item.name: item.num_bytes for item in budget.items}
    assert items["weights"] == 2 * 16_255_643_392
    # 20 layers x 4 KV heads x 128 x (K and V) x 2 bytes.
    assert items["full"] == 16 * 33_280 * 20 * 4 * 128 * 2 * 2
    assert items["logits"] == 16 * 32 * 157_184 * 4
    stays = items["weights"] + items["full"] + items["logits"]
    assert budget.limits()[0].needed_bytes == stays
    assert budget.limits()[0].limit_bytes == pytest.approx(0.7 * 80e9)


def test_the_pools_of_herald_are_the_sums_done_by_hand():
    budget = capacity.budget(build(catalogue.get("sdar-8b"), "herald"), 33_280, 34, MEMORY)
    items = {item.name: item.num_bytes for item in budget.items}
    row = 8 * 128 * 2 * 2
    assert items["exact"] == 34 * 33_280 * 2 * row
    # k of the last block, the tail and the block itself, in 34 layers, twice.
    assert items["sparse"] == 34 * 2 * (int(0.05 * (33_280 - 32)) + 64) * 34 * row
    assert items["full"] == 34 * 33_280 * 36 * row
    assert budget.total(Home.DRAM) > items["full"]


def test_what_is_needed_and_what_is_left_add_up_to_the_limit():
    budget = capacity.budget(build(catalogue.get("llada2-mini"), "herald"), 33_280, 80, MEMORY)
    for limit in budget.limits():
        assert limit.needed_bytes + limit.free_bytes == pytest.approx(limit.limit_bytes)
    resident = sum(i.num_bytes for i in budget.items if i.home is Home.HBM and not i.transient)
    assert budget.limits()[0].needed_bytes == pytest.approx(resident)


PIPELINES = [build(catalogue.get("tiny"), name) for name in ("dense", "herald", "mage-offload")]
MEMORIES = st.builds(
    Memory,
    resident_bytes=st.floats(1e5, 1e8),
    hbm_bytes=st.floats(1e5, 1e8),
    dram_bytes=st.floats(1e5, 1e8),
)


@given(st.sampled_from(PIPELINES), st.integers(1, 100), MEMORIES, st.integers(2, 200))
def test_feasible_batch_implies_feasible_batch_minus_one(pipeline, blocks, memory, batch):
    if capacity.budget(pipeline, 32 * blocks, batch, memory).fits:
        assert capacity.budget(pipeline, 32 * blocks, batch - 1, memory).fits


@given(st.sampled_from(PIPELINES), st.integers(1, 100), MEMORIES)
def test_the_largest_batch_is_what_a_search_one_by_one_finds(pipeline, blocks, memory):
    found = capacity.largest_batch(pipeline, 32 * blocks, memory)
    batch = 0
    while batch < 300 and capacity.budget(pipeline, 32 * blocks, batch + 1, memory).fits:
        batch += 1
    assert min(found, 300) == batch


@given(st.sampled_from(PIPELINES), st.integers(1, 50), MEMORIES)
def test_the_most_tokens_fit_and_one_block_more_does_not(pipeline, batch, memory):
    tokens = capacity.largest_tokens(pipeline, batch, memory)
    assert tokens % 32 == 0
    if tokens:
        assert capacity.budget(pipeline, tokens, batch, memory).fits
    assert not capacity.budget(pipeline, tokens + 32, batch, memory).fits


@given(st.sampled_from(PIPELINES), st.lists(st.integers(1, 60), min_size=1, max_size=8), MEMORIES)
def test_requests_of_any_lengths_within_the_room_fit(pipeline, blocks, memory):
    room = capacity.kv_room_tokens(pipeline, len(blocks), memory, 32 * max(blocks))
    if 32 * sum(blocks) > room:
        return
    passing = capacity.budget(pipeline, 32 * max(blocks), len(blocks), memory).passing_bytes
    hbm = min(memory.resident_bytes, memory.hbm_bytes - passing)
    for home, limit in ((Home.HBM, hbm), (Home.DRAM, memory.dram_bytes)):
        needed = sum(
            item.num_bytes
            for count in blocks
            for item in capacity.budget(pipeline, 32 * count, 1, memory).items
            if item.home is home and not item.transient and item.name != "weights"
        )
        needed += pipeline.model.weight_bytes() if home is Home.HBM else 0
        assert needed <= limit


def test_the_room_is_used_up_to_a_few_percent():
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    longest = capacity.largest_tokens(pipeline, 80, MEMORY)
    assert 0.98 < capacity.kv_room_tokens(pipeline, 80, MEMORY, longest) / (80 * longest) <= 1.01


@pytest.mark.parametrize("name", methods.names())
def test_more_of_anything_needs_no_less_memory(name):
    pipeline = build(catalogue.get("tiny"), name)
    base = capacity.budget(pipeline, 3200, 4, MEMORY)
    for other in (capacity.budget(pipeline, 3232, 4, MEMORY), capacity.budget(pipeline, 3200, 5, MEMORY)):
        pairs = zip(base.limits(), other.limits(), strict=True)
        assert all(more.needed_bytes >= less.needed_bytes for less, more in pairs)


def one_request_room(requests):
    """Memory whose KV room is exactly so many requests of llada2-mini at 32K under Dense."""
    shape = catalogue.get("llada2-mini")
    per_request = 33_280 * shape.kv_bytes_per_token() + 32 * shape.vocab_size * 4
    return Memory(shape.weight_bytes() + requests * per_request, 1e12, 1e12)


def test_a_batch_one_above_the_room_is_infeasible_and_says_which_limit_and_how_short():
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    memory = one_request_room(16)
    fits = [capacity.budget(pipeline, 33_280, batch, memory).fits for batch in (15, 16, 17)]
    assert fits == [True, True, False]
    short = 33_280 * 40_960 + 32 * 157_184 * 4
    assert capacity.budget(pipeline, 33_280, 17, memory).shortage == f"gpu kv, short by {short:,} bytes"


def test_a_model_larger_than_the_device_is_refused_with_the_table():
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    memory = Memory.of(H100, hbm_limit_gb=24)
    with pytest.raises(CapacityError) as error:
        capacity.require(pipeline, Workload.uniform(4096, 1), memory, others={"h100": MEMORY})
    message = str(error.value)
    assert "gpu weights, short by" in message
    assert "weights           32.51 GB" in message
    assert "kv per request" in message
    assert message.splitlines()[-1] == "nearest that fits: hardware h100"


def test_what_does_not_fit_names_the_nearest_batch_and_length_that_do():
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    with pytest.raises(CapacityError) as error:
        capacity.require(pipeline, Workload.uniform(32_768, 17), MEMORY)
    last = str(error.value).splitlines()[-1]
    first, second, third = last.removeprefix("nearest that fits: ").split("; or ")
    assert first == "batch 16"
    assert third.startswith("a machine with")
    tokens = int(second.split()[0].replace(",", ""))
    assert capacity.budget(pipeline, tokens, 17, MEMORY).fits
    assert not capacity.budget(pipeline, tokens + 32, 17, MEMORY).fits


def test_a_narrower_kv_that_would_fit_is_named_the_widest_of_those_that_may_be():
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    found = capacity.budget(pipeline, 33_280, 24, MEMORY)
    every, executed = (
        capacity.explain(pipeline, 33_280, found, **named).splitlines()[-1].split("; or ")
        for named in ({"formats": tuple(KVDtype)}, {})
    )
    assert "KV in int8" in every
    assert not any(remedy.startswith("KV in") for remedy in executed)
    narrow = build(catalogue.get("llada2-mini"), "dense", kv_dtype="int8", dram_kv_dtype="int8")
    assert capacity.budget(narrow, 33_280, 24, MEMORY).fits
    wide = build(catalogue.get("llada2-mini"), "dense", kv_dtype="fp32", dram_kv_dtype="fp32")
    text = capacity.explain(wide, 33_280, capacity.budget(wide, 33_280, 10, MEMORY))
    assert "KV in bf16" in text


@pytest.mark.parametrize(("model", "batch"), [("llada2-flash", 17), ("llada2-mini", 3000)])
def test_where_no_known_machine_holds_it_the_memory_of_one_that_would_is_named(model, batch):
    pipeline = build(catalogue.get(model), "herald")
    found = capacity.budget(pipeline, 33_280, batch, MEMORY)
    last = capacity.explain(pipeline, 33_280, found).splitlines()[-1].rpartition("a machine with ")[2]
    sizes = {words.split()[3]: float(words.split()[0].replace(",", "")) * 1e9 for words in last.split(" and ")}

    def with_memory(factor):
        hbm, dram = (factor * sizes.get(name, whole) for name, whole in (("device", 80e9), ("host", 936e9)))
        share = MEMORY.resident_bytes / MEMORY.hbm_bytes
        return dataclasses.replace(MEMORY, resident_bytes=share * hbm, hbm_bytes=hbm, dram_bytes=dram)

    assert capacity.budget(pipeline, 33_280, batch, with_memory(1.0)).fits
    assert not capacity.budget(pipeline, 33_280, batch, with_memory(0.999)).fits


def test_host_memory_binds_where_it_is_short():
    pipeline = build(catalogue.get("sdar-8b"), "herald")
    budget = capacity.budget(pipeline, 33_280, 34, Memory.of(H100, host_limit_gb=128))
    assert not budget.fits
    assert budget.binding.name == "host memory"


def test_what_comes_and_goes_binds_where_nothing_is_kept_back_for_it():
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    budget = capacity.budget(pipeline, 33_280, 16, MEMORY)
    tight = dataclasses.replace(MEMORY, hbm_bytes=budget.limits()[0].needed_bytes)
    assert capacity.budget(pipeline, 33_280, 16, tight).binding.name == "gpu peak"
    assert capacity.largest_batch(pipeline, 33_280, tight) < 16


def test_several_prompts_at_once_need_a_higher_peak():
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    one, four = (capacity.budget(pipeline, 33_280, 8, MEMORY, prefill_rows=rows).limits()[1] for rows in (1, 4))
    assert four.needed_bytes > one.needed_bytes


def test_a_workload_in_other_blocks_than_the_method_is_refused():
    with pytest.raises(ConfigError, match="block length 16 differs from the method's 32"):
        capacity.require(PIPELINES[0], Workload.uniform(64, 1, block_length=16), MEMORY)


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_cannot_be_is_refused(limit):
    with pytest.raises(ConfigError, match="host_limit_gb"):
        Memory.of(H100, host_limit_gb=limit)


def test_limits_only_lower_what_the_machine_has():
    assert Memory.of(H100, hbm_limit_gb=1000).hbm_bytes == MEMORY.hbm_bytes
    assert Memory.of(H100, hbm_limit_gb=40).resident_bytes == pytest.approx(0.7 * 40e9)


def test_the_budget_is_given_as_plain_values_too():
    report = capacity.budget(PIPELINES[1], 320, 2, MEMORY).as_dict()
    assert report["fits"] is True
    assert {item["name"] for item in report["items"]} >= {"weights", "full", "exact", "sparse", "logits"}


def test_a_memory_without_a_limit_says_so_in_the_table():
    from herald_pipeline.memory import UNLIMITED_BYTES

    pipeline = build(catalogue.get("llada2-mini"), "herald")
    lines = capacity.budget(pipeline, 4096, 100, Memory(1e9, 1e9, UNLIMITED_BYTES)).table().splitlines()
    (host,) = [line for line in lines if line.startswith("  host memory: ")]
    assert host.endswith(", no limit (pools in DRAM)")
    assert any("SHORT" in line for line in lines)


def test_synthetic_kv_needs_no_prompts_prefill():
    """What comes and goes is then the widest forward, and a batch may be larger."""
    pipeline = build(catalogue.get("llada2-mini"), "dense")
    real, drawn = (dataclasses.replace(MEMORY, resident_bytes=80e9, prefills=prefills) for prefills in (True, False))
    items = {item.name: item for item in capacity.budget(pipeline, 33_280, 8, drawn).items}
    assert items["prefill"].num_bytes == 0
    assert capacity.budget(pipeline, 33_280, 8, drawn).passing_bytes == items["activations"].num_bytes
    assert capacity.largest_batch(pipeline, 33_280, drawn) > capacity.largest_batch(pipeline, 33_280, real)
    assert capacity.largest_tokens(pipeline, 8, drawn) > capacity.largest_tokens(pipeline, 8, real)


def test_a_landing_of_uploads_is_one_place_of_the_ring_on_the_device():
    """80 x 1,638 entries of 4 heads of 128 in bf16, K and V; none where the device fetches rows by itself."""
    landing = dataclasses.replace(MEMORY, lands_uploads=True, workspace_bytes=5e6)
    for gather, expected in (("cpu", 80 * 1638 * 4 * 128 * 2 * 2), ("gpu", 0)):
        pipeline = build(catalogue.get("llada2-mini"), "herald", gather=gather)
        plain, found = (capacity.budget(pipeline, 32_800, 80, memory) for memory in (MEMORY, landing))
        assert found.limits()[0].needed_bytes - plain.limits()[0].needed_bytes == pytest.approx(expected + 5e6)
        assert found.kv_bytes_per_request == pytest.approx(plain.kv_bytes_per_request)


def test_what_is_fetched_whole_lands_a_row_at_a_time_and_is_scored_there():
    """A row's layer (8 heads of 128, K and V, bf16), and three fp32 matrices of 32 x 32 queries over its positions."""
    landing = dataclasses.replace(MEMORY, lands_uploads=True, resident_bytes=80e9, prefills=False)
    shape = catalogue.get("sdar-8b")
    offload, prefetch = (
        {item.name: item for item in capacity.budget(build(shape, name), 32_832, 16, landing).items}
        for name in ("mage-offload", "layer-prefetch")
    )
    for items in (offload, prefetch):
        assert items["row_landing"].num_bytes == 32_832 * 8 * 128 * 2 * 2
    assert offload["selection"].num_bytes == 3 * 32 * 32 * 32_832 * 4
    assert "selection" not in prefetch
    found = capacity.budget(build(shape, "mage-offload"), 32_832, 16, landing)
    assert found.passing_bytes == offload["selection"].num_bytes > offload["activations"].num_bytes


def test_where_admitted_prompts_go_through_a_layer_together_each_holds_its_ring_and_its_hidden_states():
    """8 prompts: seven more rings of two layers' KV (4 heads of 128, K and V, bf16) and seven more rows of hidden."""
    pipeline = build(catalogue.get("llada2-mini"), "herald")
    together = dataclasses.replace(MEMORY, prompts_wait_in_layer=True)
    alone, held = (capacity.budget(pipeline, 33_280, 8, memory) for memory in (MEMORY, together))
    (before,), (after,) = ([i.num_bytes for i in found.items if i.name == "prefill"] for found in (alone, held))
    ring, hidden = 2 * 33_280 * 4 * 128 * 2 * 2, (33_280 + 32) * 2048 * 2
    assert after - before == 7 * (ring + hidden)
    drawn = dataclasses.replace(together, prefills=False)
    assert capacity.budget(pipeline, 33_280, 8, drawn).passing_bytes < before
