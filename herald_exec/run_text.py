"""The result of ``herald-exec run`` for people."""

import textwrap

from herald_pipeline.result import Result
from herald_pipeline.units import NS_PER_S, format_ns

WIDTH = 100
"""Columns of a line, as the simulator prints them."""


def _rate(value: float) -> str:
    return f"{value:,.4g} tok/s" if value < 1000 else f"{value:,.0f} tok/s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_ns(value * NS_PER_S)


def result_text(result: Result) -> str:
    """Figures, one a line, in the simulator's words; what could not be derived or was not there is left out."""
    about = result.extra
    lines = [
        f"{about.get('model', 'model')} with {about.get('method', 'method')}, measured, batch {result.batch}, "
        f"budget {result.budget:g}"
    ]
    if result.throughput_tok_s is not None:
        lines.append(f"  throughput      {_rate(result.throughput_tok_s)}, decode, warm-up blocks excluded")
        lines.append(
            f"  block           {_seconds(result.block_time_s)}  (first block {_seconds(result.first_block_time_s)})"
        )
        lines.append(
            f"  main stream     {_seconds(result.main_time_s)} of forwards, waits {_seconds(result.stall_s)}, "
            f"{_seconds(result.exposed_transfer_s)} of it for transfers alone"
        )
    else:
        lines.append("  throughput      not known: the first block is warm-up, and no other was completed")
    if result.retrieval_time_s:
        lines.append(f"  retrieval       {_seconds(result.retrieval_time_s)} a pass, from its first launch to its last")
    if result.forwards_per_block is not None and result.tokens_per_forward is not None:
        forwards, tokens = result.forwards_per_block, result.tokens_per_forward
        lines.append(f"  forwards        {forwards:.2f} a row's block, {tokens:.2f} tokens each")
    if result.prefill_tok_s:
        lines.append(f"  prefill         {_seconds(result.prefill_time_s)}, {_rate(result.prefill_tok_s)}")
    if result.fill_time_s:
        lines.append(f"  prefill         none: KV was filled with random numbers, in {_seconds(result.fill_time_s)}")
    lines.append(
        f"  requests        {result.finished} finished, {len(result.rejected)} rejected, "
        f"{result.delivered_tokens:,} token{'' if result.delivered_tokens == 1 else 's'} delivered"
    )
    lines += [f"    {reason}" for reason in result.rejected.values()]
    path = str(about.get("device_path", "fused"))
    if path != "fused":
        lines.append(f"  device          {path}; a fraction of the device's speed")
    if result.beyond_max_positions:
        lines.append("  beyond the model's maximum positions: speed only, no text would come of it")
    lines += [f"  assumed         {assumption}" for assumption in result.assumptions]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent=" " * 18) for line in lines)
