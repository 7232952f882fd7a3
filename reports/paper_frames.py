"""Rows of the papers' exhibits -> tables that charts draw; and the two curves that an exhibit states one number of."""

from collections.abc import Hashable
from typing import Any

import pandas as pd

from herald_pipeline import catalogue, published
from herald_pipeline import pipeline as pipelines
from herald_pipeline.hardware import Profile, known
from herald_pipeline.stages import LaunchShape
from herald_sim.cost import CostModel
from herald_sim.exhibits import rows as exhibit_rows

MODEL = "llada2-mini"
QUERIES = (32, 16, 8, 4, 2, 1)
_MODELS = {name: words for words, name in published.MODELS.items()}
_CEILINGS = {
    "full_kv_fetch_per_step": ("full KV over the link each step", "link"),
    "sparse_fetch_per_step": ("sparse KV over the link each step", "link"),
    "sparse_fetch_per_block": ("sparse KV over the link once a block", "link"),
    "cpu_32q_attention": ("selection by 32 queries on the CPU", "cpu"),
    "gpu_full_kv_forward": ("forwards over full KV on the GPU", "gpu"),
    "gpu_sparse_forward": ("forwards over sparse KV on the GPU", "gpu"),
}


def exhibit(name: str, profile: Profile) -> pd.DataFrame:
    """An exhibit's rows as they are; a column of numbers where the papers print words stays empty."""
    frame = pd.DataFrame(exhibit_rows(name, profile))
    for column in ("published", "value", "error"):
        if column in frame:
            frame[column] = pd.to_numeric(frame[column], errors="coerce")
    return frame


def table_2(profile: Profile) -> pd.DataFrame:
    """Table II with a panel a model and context."""
    frame = exhibit("table-2", profile)
    frame["panel"] = [
        f"{_MODELS.get(m, m)}, {c // 1024}K" for m, c in zip(frame["model"], frame["context"], strict=True)
    ]
    return frame


def fig_13(profile: Profile) -> pd.DataFrame:
    """Fig. 13 with a panel a context."""
    frame = exhibit("fig-13", profile)
    frame["panel"] = [f"{context // 1024}K" for context in frame["context"]]
    return frame


def fig_4(profile: Profile) -> pd.DataFrame:
    """Fig. 4: Dense as far as memory goes, beyond it, and the line that it cannot pass."""
    frame = exhibit("fig-4", profile)
    # A line that goes on beyond memory begins where the other one ends.
    return _joined(frame, [("dense", "dense, projected")], ["forwards over full KV, any batch"])


def fig_12(profile: Profile) -> pd.DataFrame:
    """Fig. 12: Dense, Dense as if memory were endless, HERALD, the ideal, and the link's line."""
    frame = exhibit("fig-12", profile)
    frame["method"] = ["ideal" if "ideal" in name else name.partition(",")[0] for name in frame["series"]]
    frame["fits"] = ["projected" not in name for name in frame["series"]]
    return _joined(frame, [("dense", "dense, projected")], ["sparse KV over the link each step"])


def _joined(frame: pd.DataFrame, pairs: list[tuple[str, str]], labels: list[str]) -> pd.DataFrame:
    frame = frame.copy()
    if "series" not in frame:
        frame["series"] = [
            m if fits else f"{m}, projected" for m, fits in zip(frame["method"], frame["fits"], strict=True)
        ]
    for solid, dashed in pairs:
        own = frame[(frame["series"] == solid) & frame["batch"].notna()]
        last = own.loc[[own["batch"].idxmax()]].assign(series=dashed, fits=False, published=None, error=None)
        last["published"] = pd.to_numeric(last["published"])
        last["error"] = pd.to_numeric(last["error"])
        frame = pd.concat([frame, last], ignore_index=True)
    frame["fits"] = ["fits" if fits else "beyond memory" for fits in frame["fits"]]
    texts = iter(labels)
    frame["label"] = [_label(next(texts), row) if pd.isna(row["batch"]) else "" for row in frame.to_dict("records")]
    return frame


def _label(words: str, row: dict[Hashable, Any]) -> str:
    printed = f", printed {row['published']:,.0f}" if pd.notna(row["published"]) else ""
    return f"{words}: ours {row['value']:,.0f}{printed}"


def fig_5(profile: Profile) -> pd.DataFrame:
    """Fig. 5's ceilings with words for each."""
    frame = exhibit("fig-5", profile)
    names = [name.removeprefix("Fig 5 ") for name in frame["name"]]
    frame["ceiling"] = [_CEILINGS.get(name, (name, ""))[0] for name in names]
    frame["resource"] = [_CEILINGS.get(name, ("", "other"))[1] for name in names]
    return frame


def fig_14(profile: Profile) -> pd.DataFrame:
    """Fig. 14 in long form: a row a method and T with its throughput, a row a stream and T with its latency."""
    rows: list[dict[str, Any]] = []
    for found in exhibit_rows("fig-14", profile):
        common = {"panel": f"{found['context'] // 1024}K", "T": found["T"], "first": found["first_T_above_dense"]}
        empty = {"method": None, "tok_s": None, "stream": None, "latency_s": None, "published": None}
        for method in ("dense", "herald"):
            printed = found["published"] if method == "dense" else None
            rows.append({**common, **empty, "method": method, "tok_s": found[f"{method}_tok_s"], "published": printed})
        rows += [
            {**common, **empty, "stream": stream, "latency_s": found[f"{stream}_latency_s"]}
            for stream in ("main", "retrieval")
        ]
    frame = pd.DataFrame(rows)
    for column in ("tok_s", "latency_s", "published"):
        frame[column] = pd.to_numeric(frame[column])
    return frame


def selection_by_queries(profile: Profile, context: int = 32768) -> pd.DataFrame:
    """Selection of one request's layer on the CPU by number of queries: time, bytes, FLOPs, gain over all queries."""
    shape = catalogue.get(MODEL)
    printed = published.find(exhibit="Fig 8", metric="kernel_throughput_gain_32q_to_1q")[0].number
    rows = []
    for queries in QUERIES:
        pipeline = pipelines.build(shape, "mage-cpu-representative", queries=queries)
        stage = next(stage for stage in pipeline.template.stages() if stage.name == "select")
        # Nothing is selected: of a kernel by itself nothing is copied beside it.
        launch = LaunchShape(1, queries, queries, context, 0, 0, queries * context, 0)
        cost = CostModel(pipeline, profile).stage_cost(stage, launch, shape.num_layers - 1)
        rows.append({"queries": queries, "ns": cost.total_ns, "flops": cost.flops, "bytes": cost.dram_bytes})
    frame = pd.DataFrame(rows)
    frame["gain"] = frame["ns"].max() / frame["ns"]
    frame["published"] = [printed if queries == 1 else None for queries in frame["queries"]]
    frame["published"] = pd.to_numeric(frame["published"])
    return frame


def cpu_roofline(profile: Profile) -> pd.DataFrame:
    """The CPU's roof over operational intensity, and where selection by each number of queries lies under it."""
    machine = profile.machine
    rate, peak = known(machine.dram.read_gb_s).peak, known(machine.cpu.attention_tflop_s).peak * 1000
    found = selection_by_queries(profile)
    found["intensity"] = found["flops"] / found["bytes"]
    found["value"] = found["flops"] / found["ns"]
    found["label"] = ["1 query" if q == 1 else f"{q} queries" for q in found["queries"]]
    corners = pd.DataFrame({"intensity": [1.0, peak / rate, 256.0]})
    frame = pd.concat([found, corners], ignore_index=True).sort_values("intensity", ignore_index=True)
    frame["roof"] = [min(peak, rate * intensity) for intensity in frame["intensity"]]
    return frame[["queries", "intensity", "roof", "value", "label"]]


def printed_ridges() -> tuple[float, float]:
    """The range of ridge points that Fig. 6 prints, FLOP/byte."""
    low, high = (published.number(exhibit="Fig 6", metric=f"ridge_{end}") for end in ("low", "high"))
    return low, high


def dsb(name: str, profile: Profile) -> pd.DataFrame:
    """A table of the DSB article with its setting in one column."""
    frame = exhibit(name, profile)
    caches = frame["cache"].replace("None", "no cache")
    frame["setting"] = frame["decoder"] + ", " + frame["scheduler"] + ", " + caches
    return frame


def dsb_example(profile: Profile) -> pd.DataFrame:
    """The worked example's edges: ``roundN_s`` and ``roundN_e``."""
    frame = exhibit("dsb-example", profile)
    parts = frame["quantity"].str.extract(r"^round(?P<round>\d+)_(?P<edge>[se])$")
    found = pd.concat([frame, parts], axis=1).dropna(subset=["round"])
    return found.assign(round=found["round"].astype(int))
