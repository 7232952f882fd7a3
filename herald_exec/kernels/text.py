"""What ``herald-exec kernels`` finds, for people: tables whose cells go on below themselves and are never cut."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .options import PHASES

_PROBLEMS = 20
"""Problems of one tier that are shown; a wrong kernel has thousands."""


def _say(text: Console, line: str, style: str | None = None) -> None:
    # A file or pipe gets the whole line; a terminal breaks it by itself.
    text.print(line, style=style, markup=False, soft_wrap=True)


def _table(text: Console, header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> None:
    """Print columns without borders, which would take the room of cells; all but those of ``words`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    text.print(table)


def show_check(rows: Sequence[dict[str, Any]], text: Console) -> None:
    """A line for each tier, a line below for each of its errors, and the problems."""
    errors = ["\n".join(f"{name} {value:.1e}" for name, value in row["worst_error"].items()) for row in rows]
    _table(
        text,
        ("tier", "cases", "differing\nindices", "problems", "largest errors"),
        [
            (row["tier"], str(row["cases"]), str(row["swaps"]), str(len(row["problems"])), worst)
            for row, worst in zip(rows, errors, strict=True)
        ],
        words=("tier", "largest errors"),
    )
    for row in rows:
        for problem in row["problems"][:_PROBLEMS]:
            _say(text, f"{row['tier']}: {problem}", "red")


def show_bench(result: dict[str, Any], text: Console) -> None:
    """Speed of each kernel, where its time went, and what it is compared with."""
    ceilings = ", ".join(f"{t} threads {v['median']:.1f}" for t, v in result["read_gb_s"].items())
    _say(text, f"{result['cpu']}; DRAM read GB/s: {ceilings}")
    kernels = result["kernels"]
    _table(
        text,
        ("kernel", "rows", "GB/s", "of read\nceiling", "GFLOP/s", "of roof"),
        [
            (
                row["name"],
                str(row["rows"]),
                f"{row['gb_s']:.2f}",
                f"{row['of_read_ceiling']:.3f}",
                f"{row['gflops']:.0f}",
                f"{row['of_roof']:.2f} {row['roof']}",
            )
            for row in kernels
        ],
        words=("kernel",),
    )
    spent = [name for name in PHASES if any(row["phase_shares"][name] for row in kernels)]
    _say(text, "\nshares of each kernel's time:")
    _table(
        text,
        ("kernel", *spent),
        [(row["name"], *(f"{row['phase_shares'][name]:.1%}" for name in spent)) for row in kernels],
        words=("kernel",),
    )
    _say(text, "")
    for row in result["limits"]:
        _say(text, f"{row['name']}: {row['ratio']:.2f}x, limit {row['limit']:.2f}x")
    for row in result["topk"]:
        _say(text, f"top-k, {row['order']}: {row['us']:.1f} us; heap {row['heap_us']:.1f} us ({row['speedup']:.1f}x)")
    got = result["gather"]
    _say(
        text,
        f"gather {got['gb_s']:.2f} GB/s = {got['of_memcpy']:.2f} of memcpy ({got['memcpy_gb_s']:.2f}), "
        f"{got['of_faster_copy']:.2f} of the faster copy (past the cache {got['streaming_copy_gb_s']:.2f})",
    )
    for row in result.get("torch", []):
        _say(
            text,
            f"torch {row['name']}: {row['gb_s']:.2f} GB/s; ours {row['ours_over_it']:.2f}x, limit {row['limit']:.2f}x",
        )
