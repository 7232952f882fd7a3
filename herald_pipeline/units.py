"""Units: GB = 10^9 bytes, GiB = 2^30 bytes, simulated time in integer nanoseconds.

Units live in names (``_gb_s``, ``_bytes``, ``_ns``); this module is the only place that converts between them.
"""

GB = 10**9
GIB = 2**30
MIB = 2**20
KIB = 2**10
NS_PER_S = 10**9
NS_PER_US = 10**3
NS_PER_MS = 10**6


def transfer_ns(num_bytes: float, rate_gb_s: float) -> int:
    """Time in nanoseconds that ``num_bytes`` take at ``rate_gb_s`` (1 GB at 1 GB/s is 10^9 ns)."""
    # GB/s is exactly bytes/ns, so no factor appears.
    return round(num_bytes / rate_gb_s)


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` for people: decimal units, the ones of datasheets and link rates."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def format_ns(duration_ns: float) -> str:
    """A duration for people, in the unit that keeps one to three digits before the point."""
    for unit, size in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if abs(duration_ns) >= size:
            return f"{duration_ns / size:.2f} {unit}"
    return f"{duration_ns:.0f} ns"
