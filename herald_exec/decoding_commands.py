"""Commands on decoding policies: ``diff-cache``, ``bench-decoding``, ``tune-decoding``.

    herald-exec diff-cache --model DIR --cache dsb --scheduler dsb-greedy --prompts prompts.jsonl
    herald-exec bench-decoding --model DIR --prompts prompts.jsonl --json > bench.json
    herald-exec tune-decoding --model DIR --prompts prompts_with_answers.jsonl

Results go to stdout (``--json``: exactly one object), everything else to stderr. torch is imported inside the commands.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from herald_pipeline.decoding.policy import model_policy
from herald_pipeline.decoding.views import Combination, all_combinations
from herald_pipeline.errors import ConfigError, check_number, raise_problems

if TYPE_CHECKING:
    from herald_exec.bidirectional.prompts import Item
    from herald_exec.checkpoints.tokenizer import TextTokenizer
    from herald_exec.models.base import BlockModel

Model = Annotated[
    str, typer.Option(help="Checkpoint folder, herald-ref-bidirectional, or a name with --weights random.")
]
Weights = Annotated[str, typer.Option(help="checkpoint, or random (seeded; speed only).")]
Prompts = Annotated[Path | None, typer.Option(help='JSONL: {"prompt" or "tokens", "answer"} a line.')]
RandomPrompts = Annotated[int, typer.Option(help="Number of random prompts, without --prompts.")]
PromptTokens = Annotated[int, typer.Option(help="Length of a random prompt.")]
GenTokens = Annotated[int, typer.Option(help="Response length.")]
Block = Annotated[int, typer.Option(help="B, and S_init of sliding blocks.")]
Steps = Annotated[int, typer.Option(help="T of decoders with a schedule.")]
Threshold = Annotated[float | None, typer.Option(help="Confidence threshold [0.9].")]
SMax = Annotated[int | None, typer.Option(help="Cap of a sliding block; unbounded without it.")]
PrefixWindow = Annotated[int | None, typer.Option(help="p_min of the dsb cache [24; 4 for Dream].")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
DTypeName = Annotated[str | None, typer.Option("--dtype", help="fp32, bf16 or fp16 [the stored one; fp32].")]
StopAtEos = Annotated[bool, typer.Option("--stop-at-eos", help="End a row once its EOS is final, as engines do.")]
Delimiters = Annotated[
    list[int] | None,
    typer.Option("--delimiter", help="Token id that ends an AdaBlock block; repeat [LLaDA's; Dream's]."),
]
Seed = Annotated[int, typer.Option(help="Of random weights, random prompts and sampling.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True)
class _Loaded:
    model: "BlockModel"
    tokenizer: "TextTokenizer | None"
    items: "list[Item]"
    facts: dict[str, Any]


def _load(
    model: str,
    weights: str,
    prompts: Path | None,
    random_prompts: int,
    prompt_tokens: int,
    gen_tokens: int,
    device: str,
    dtype: str | None,
    seed: int,
) -> _Loaded:
    from herald_exec.bidirectional.loading import load_model
    from herald_exec.bidirectional.prompts import random_items, read_items

    raise_problems(
        [
            check_number(gen_tokens, "--gen-tokens", minimum=1, integer=True),
            check_number(seed, "--seed", minimum=0, integer=True),
        ]
    )
    loaded, tokenizer = load_model(model, weights, device, dtype, seed)
    if prompts is not None:
        items = read_items(prompts, tokenizer)
    else:
        items = random_items(loaded.shape, random_prompts, prompt_tokens, seed)
    longest = max(len(item.prompt) for item in items) + gen_tokens
    facts = {
        "model": loaded.shape.name,
        "weights": weights,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": device,
        "prompts": "file" if prompts is not None else "random",
        "response_length": gen_tokens,
        "beyond_max_positions": longest > loaded.shape.max_positions,
        "provenance": "measured",
    }
    return _Loaded(loaded, tokenizer, items, facts)


def _delimiters(ids: Sequence[int] | None, model: "BlockModel") -> tuple[int, ...] | None:
    for token in ids or ():
        raise_problems(
            [check_number(token, "--delimiter", minimum=0, maximum=model.shape.vocab_size - 1, integer=True)]
        )
    return tuple(ids) if ids else None


def _note(text: str) -> None:
    print(text, file=sys.stderr)


_SHORT = {
    "nfe_before_eos": "nfe to EOS",
    "tokens_per_forward": "tok/forward",
    "seconds_per_forward": "s/forward",
    "throughput_tok_s": "tok/s",
    "forwarded_positions": "computed",
    "reused_positions": "reused",
    "same_as_reference": "as top1",
    "refresh_range": "refresh",
    "max_logit_error": "logit err",
    "max_kv_error": "KV err",
}


def _print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(_SHORT.get(column, column))
    for row in rows:
        values = [row.get(column) for column in columns]
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "-" if v is None else str(v) for v in values))
    Console(width=max(80, 14 * len(columns))).print(table)


def diff_cache(
    model: Model,
    cache: Annotated[str, typer.Option(help="Cache rule to compare with none.")] = "dsb",
    scheduler: Annotated[str, typer.Option(help="Block scheduler.")] = "dsb-greedy",
    decoder: Annotated[str, typer.Option(help="Acceptance rule.")] = "confidence",
    weights: Weights = "checkpoint",
    prompts: Prompts = None,
    random_prompts: RandomPrompts = 2,
    prompt_tokens: PromptTokens = 64,
    gen_tokens: GenTokens = 64,
    block: Block = 32,
    steps: Steps = 32,
    threshold: Threshold = None,
    s_max: SMax = None,
    prefix_window: PrefixWindow = None,
    delimiter: Delimiters = None,
    device: Device = "cpu",
    dtype: DTypeName = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Cache against no cache in lockstep on the same tokens; fails if a refresh leaves an error."""
    from herald_exec.bidirectional import lockstep, make_batch

    loaded = _load(model, weights, prompts, random_prompts, prompt_tokens, gen_tokens, device, dtype, seed)
    policy = model_policy(
        decoder,
        scheduler,
        cache,
        shifted_logits=loaded.model.shape.shifted_logits,
        threshold=threshold,
        block=block,
        s_max=s_max,
        prefix_window=prefix_window,
        steps=steps,
    )
    batch = make_batch(
        loaded.model.shape, [item.prompt for item in loaded.items], gen_tokens, device=loaded.model.device
    )
    found = lockstep.diff_cache(loaded.model, batch, policy, delimiters=_delimiters(delimiter, loaded.model))
    summary = lockstep.summary(found)
    choice = {"decoder": decoder, "scheduler": scheduler, "cache": cache}
    if as_json:
        print(json.dumps({**loaded.facts, **choice, **summary, "rows": [d.to_dict() for d in found]}))
        return
    columns = ("row", "round", "s", "e", "U", "committed", "forwarded", "reused", "refresh_range")
    _print_table(
        f"{cache} against none, {loaded.facts['model']}",
        [d.to_dict() for d in found],
        (*columns, "max_logit_error", "max_kv_error", "agrees"),
    )
    for name in ("logit_error_by_distance", "kv_error_by_distance"):
        groups = ", ".join(f"{group} {value:.3g}" for group, value in summary[name].items())
        print(f"{name.replace('_', ' ')} from s, rounds without refresh: {groups or 'none'}")
    print(f"{summary['agreeing_rounds']} of {summary['rounds']} rounds commit what no cache would; refreshes leave 0")


def _grid(decoders: Sequence[str], schedulers: Sequence[str], caches: Sequence[str]) -> list[Combination]:
    from herald_pipeline.decoding import acceptance
    from herald_pipeline.decoding import caches as cache_rules
    from herald_pipeline.decoding import schedulers as block_rules

    for name in decoders:
        acceptance.REGISTRY.entry(name)
    for name in schedulers:
        block_rules.REGISTRY.entry(name)
    for name in caches:
        cache_rules.REGISTRY.entry(name)
    if not (decoders or schedulers or caches):
        return all_combinations()
    return [
        Combination(decoder, scheduler, cache)
        for decoder in decoders or ["confidence"]
        for scheduler in schedulers or ["fixed"]
        for cache in caches or ["none"]
    ]


def bench_decoding(
    model: Model,
    decoder: Annotated[list[str] | None, typer.Option(help="Repeat for several; all views without any.")] = None,
    scheduler: Annotated[list[str] | None, typer.Option(help="Repeat for several.")] = None,
    cache: Annotated[list[str] | None, typer.Option(help="Repeat for several.")] = None,
    weights: Weights = "checkpoint",
    prompts: Prompts = None,
    random_prompts: RandomPrompts = 4,
    prompt_tokens: PromptTokens = 64,
    gen_tokens: GenTokens = 256,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    block: Block = 32,
    steps: Steps = 32,
    threshold: Threshold = None,
    s_max: SMax = None,
    prefix_window: PrefixWindow = None,
    temperature: Annotated[float, typer.Option(help="0 is the argmax.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of probability kept.")] = 1.0,
    match: Annotated[str, typer.Option(help="exact, contains or last-number (answers in text).")] = "exact",
    diagnose: Annotated[bool, typer.Option(help="Late and premature ratios (confidences of all masks).")] = False,
    stop_at_eos: StopAtEos = False,
    delimiter: Delimiters = None,
    check: Annotated[bool, typer.Option(help="Assert the caches' invariants each round.")] = False,
    device: Device = "cpu",
    dtype: DTypeName = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Decoders x schedulers x caches over prompts: forwards, commits, positions, time, accuracy."""
    from herald_exec.bidirectional.bench import Settings, bench

    combinations = _grid(decoder or [], scheduler or [], cache or [])
    raise_problems([check_number(batch, "--batch", minimum=1, integer=True)])
    loaded = _load(model, weights, prompts, random_prompts, prompt_tokens, gen_tokens, device, dtype, seed)
    settings = Settings(
        response_length=gen_tokens,
        batch_size=batch,
        block=block,
        steps=steps,
        threshold=threshold,
        s_max=s_max,
        prefix_window=prefix_window,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        match=match,
        check=check,
        diagnose=diagnose,
        stop_at_eos=stop_at_eos,
        delimiters=_delimiters(delimiter, loaded.model),
    )
    result = bench(loaded.model, loaded.items, combinations, settings, tokenizer=loaded.tokenizer)
    for left_out in result["skipped"]:
        _note(f"left out {left_out['decoder']} + {left_out['scheduler']} + {left_out['cache']}: {left_out['reason']}")
    if as_json:
        print(json.dumps({**loaded.facts, "batch": batch, "block": block, **result}))
        return
    print(f"counted: {result['counted']}")
    columns = ["decoder", "scheduler", "cache", "nfe", "nfe_before_eos", "tokens_per_forward", "seconds_per_forward"]
    columns += ["throughput_tok_s", "forwarded_positions", "reused_positions", "accuracy", "same_as_reference"]
    by_choice = {tuple(Combination(r["decoder"], r["scheduler"], r["cache"])): r for r in result["combinations"]}
    in_a_view = set()
    for name, view in result["views"].items():
        rows = [by_choice[tuple(c)] for c in view["combinations"]]
        in_a_view |= {tuple(c) for c in view["combinations"]}
        if rows:
            _print_table(f"{name}: varies {view['varies']}", rows, columns)
    rest = [row for choice, row in by_choice.items() if choice not in in_a_view]
    if rest:
        _print_table("in no view: several axes vary", rest, columns)


def tune_decoding(
    model: Model,
    prompts: Annotated[Path, typer.Option(help='JSONL with an "answer" a line.')],
    alpha: Annotated[float, typer.Option(help="Chance of stopping although nothing is lost.")] = 0.05,
    s_max: Annotated[str, typer.Option(help="Caps to try, rising.")] = "48,64,80,96",
    gen_tokens: GenTokens = 256,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    block: Block = 32,
    threshold: Threshold = None,
    prefix_window: PrefixWindow = None,
    match: Annotated[str, typer.Option(help="exact, contains or last-number (answers in text).")] = "exact",
    stop_at_eos: StopAtEos = False,
    weights: Weights = "checkpoint",
    device: Device = "cpu",
    dtype: DTypeName = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """DSB's ladder on prompts with answers: const, rising S_max, greedy, then the cache; stops at a loss."""
    from herald_exec.bidirectional.bench import Settings
    from herald_exec.bidirectional.tune import tune

    try:
        caps = [int(part) for part in s_max.split(",") if part.strip()]
    except ValueError:
        message = f"--s-max must be whole numbers with commas, got {s_max!r}"
        raise ConfigError(message) from None
    raise_problems([check_number(batch, "--batch", minimum=1, integer=True)])
    loaded = _load(model, weights, prompts, 1, 1, gen_tokens, device, dtype, seed)
    settings = Settings(
        response_length=gen_tokens,
        batch_size=batch,
        block=block,
        threshold=threshold,
        prefix_window=prefix_window,
        seed=seed,
        match=match,
        stop_at_eos=stop_at_eos,
    )
    result = tune(loaded.model, loaded.items, settings, alpha=alpha, s_max=caps, tokenizer=loaded.tokenizer)
    if as_json:
        print(json.dumps({**loaded.facts, **result}))
        return
    print(f"counted: {result['counted']}")
    columns = ("rung", "cache", "accuracy", "losses", "gains", "p_value", "tokens_per_forward", "throughput_tok_s")
    _print_table("tune-decoding, against fixed blocks without a cache", [result["base"], *result["rungs"]], columns)
    if result["stopped_at"]:
        print(f"stopped at {result['stopped_at']}: its loss is significant at alpha {alpha:g}")
    best = result["recommended"]
    print(f"recommended: {best['rung']} (scheduler {best['scheduler']}, s_max {best['s_max']}, cache {best['cache']})")


def register(app: typer.Typer) -> None:
    """Mount the three commands."""
    app.command("diff-cache")(diff_cache)
    app.command("bench-decoding")(bench_decoding)
    app.command("tune-decoding")(tune_decoding)
