"""What a method is run with: block length, budget, queries, exact layers, storage formats."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems
from herald_pipeline.model import KVDtype

MAX_STAGING_BUFFERS = 16
"""Places of a ring: the validator goes twice round it, and no machine gains from more."""

KEYS = ("full", "key-only", "int8")
"""How a selection on the CPU reads KV; all but the first are beyond the paper."""

GATHERS = ("cpu", "fused", "gpu")
"""Who brings a layer's selected entries together; all but the first are beyond the paper."""

INT8_CANDIDATES = 1.1
"""With 8-bit keys, times the budget that may be selected: ranks from budget / 1.1 to 1.1 x budget are scored again from
the keys themselves (the kernels' default)."""
INT8_HEAVIEST = 1 / 8
"""Of those that rank before them, the share that is scored again too: they make most of a softmax's denominator."""

PREFIX = "settings."
"""What a path of ``--set`` begins with where it means a setting."""

MAX_WINDOW_BLOCKS = 64
"""A window longer than any response that the papers decode; beyond it a number is a mistake."""


def more_than_all(budget: float) -> str | None:
    """What to say to a budget above 1, which selects everything as 1 does: 5 was perhaps meant as 5%."""
    if not 1 < budget < float("inf"):
        return None
    return f"budget {budget:g} is more than all KV: all of it is selected; {budget:g}% is {budget / 100:g}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Free parameters of a method; each method gives its own defaults.

    Attributes
    ----------
    block_length
        B, tokens of a block.
    budget
        Share of the completed prefix that is selected, per KV head (0 selects nothing, 1 or more everything).
    queries
        x, [MASK] queries that score the prefix in selection: 1 (the representative at B // 2) up to B.
    exact_layers
        First layers that attend to the full prefix on the GPU (paper section IV-B2: two).
    exact_layers_on
        Where the retrieval pass attends in those layers: ``cpu`` (the paper scans every layer there) or ``gpu``.
    keys
        What a selection on the CPU reads: ``full`` keys and values (the paper); ``key-only``, keys and the selected
        entries' values; ``int8``, a copy of the keys in 8 bits, the keys of what is scored again
        (:data:`INT8_CANDIDATES`, :data:`INT8_HEAVIEST`), and the selected values. Layers that
        select nothing are read in full.
    gather
        Who brings the selected entries of a layer together after a selection on the CPU. ``cpu``: a copy into a pinned
        ring beside what follows (the paper, section IV-B4). ``fused``: the same copy, by each worker right behind its
        top-k, while a part of the entries may still be in a cache. ``gpu``: nobody; the device reads the rows from
        page-locked host memory by itself, so host memory is read once and not written.
    staging_buffers
        Places of the pinned ring between gather and upload, and of the ring that takes fetched layers.
    kv_dtype, dram_kv_dtype
        Storage format of KV in device memory (and on the link) and in host memory.
    proxy_fraction
        InfiniGen's partial keys: share of the head dimension that the proxy reads.
    retrieval_fraction
        SpeContext's retrieval model: its parameters as a share of the main model's active ones.
    selection_overlap
        SpeContext's elastic loading: share of a block's selected entries that the block before had selected too.
    window_blocks
        herald-sliding's window, in periods of ``block_length`` committed tokens.
    """

    block_length: int = 32
    budget: float = 0.05
    queries: int = 1
    exact_layers: int = 2
    exact_layers_on: str = "cpu"
    keys: str = "full"
    gather: str = "cpu"
    staging_buffers: int = 2
    kv_dtype: KVDtype = KVDtype.BF16
    dram_kv_dtype: KVDtype = KVDtype.BF16
    proxy_fraction: float = 0.2
    retrieval_fraction: float = 0.1
    selection_overlap: float = 0.0
    window_blocks: int = 1

    def __post_init__(self) -> None:
        problems = [
            check_number(self.block_length, "block_length", minimum=1, integer=True),
            check_number(self.budget, "budget", minimum=0),
            check_number(self.queries, "queries", minimum=1, integer=True),
            check_number(self.exact_layers, "exact_layers", minimum=0, integer=True),
            check_number(self.staging_buffers, "staging_buffers", minimum=1, maximum=MAX_STAGING_BUFFERS, integer=True),
            check_number(self.proxy_fraction, "proxy_fraction", above=0, maximum=1),
            check_number(self.retrieval_fraction, "retrieval_fraction", above=0, maximum=1),
            check_number(self.selection_overlap, "selection_overlap", minimum=0, maximum=1),
            check_number(self.window_blocks, "window_blocks", minimum=1, maximum=MAX_WINDOW_BLOCKS, integer=True),
        ]
        longest = 0 if any(problems) else self.block_length * self.window_blocks
        if not any(problems) and self.queries > longest:
            what = "block_length" if self.window_blocks == 1 else "block_length x window_blocks"
            problems.append(f"queries must be <= {what}, got {self.queries} > {longest}")
        if self.exact_layers_on not in ("cpu", "gpu"):
            problems.append(f"exact_layers_on must be 'cpu' or 'gpu', got {self.exact_layers_on!r}")
        if self.keys not in KEYS:
            problems.append(f"keys must be one of {', '.join(KEYS)}, got {self.keys!r}{did_you_mean(self.keys, KEYS)}")
        if self.gather not in GATHERS:
            known = ", ".join(GATHERS)
            problems.append(f"gather must be one of {known}, got {self.gather!r}{did_you_mean(self.gather, GATHERS)}")
        raise_problems(problems)
        # More than everything is everything, and is reported as such.
        object.__setattr__(self, "budget", min(self.budget, 1.0))

    @property
    def window_length(self) -> int:
        """W, positions that a forward computes of a row: B, or herald-sliding's window."""
        return self.block_length * self.window_blocks

    @property
    def drafted_tokens(self) -> int:
        """Drafted positions that a selection reads: those before its first query, which stands for what is behind."""
        window = self.window_length
        return min(window, self.block_length + window // 2 - self.queries // 2)

    def replace(self, **changes: Any) -> Self:
        """These settings with ``changes``; an unknown name is refused with the closest one."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        unknown = [name for name in changes if name not in known]
        if unknown:
            raise ConfigError([f"unknown method setting {name!r}{did_you_mean(name, known)}" for name in unknown])
        if "queries" not in changes and self.queries == self.block_length:
            # All queries means all of the block, whatever its length.
            changes["queries"] = changes.get("block_length", self.block_length)
        for name in ("kv_dtype", "dram_kv_dtype"):
            if name in changes:
                changes[name] = _kv_dtype(changes[name], name)
        return type(self)(**{**known, **changes})

    def selected_tokens(self, prefix_tokens: int) -> int:
        """Entries selected per KV head of a prefix of S tokens: floor(budget x S), at least 1, at most S."""
        if self.budget <= 0 or prefix_tokens <= 0:
            return 0
        # The tolerance undoes binary rounding: 0.05 x 32760 is 1638 whatever the platform's last bit.
        return min(prefix_tokens, max(1, int(self.budget * prefix_tokens + 1e-9)))


def _kv_dtype(value: str, path: str) -> KVDtype:
    try:
        return KVDtype(value)
    except ValueError:
        message = f"{path} {value!r} is not a KV format{did_you_mean(str(value), list(KVDtype))}"
        raise ConfigError(message) from None


def read_settings(texts: Iterable[str], given: Collection[str] = ()) -> dict[str, Any]:
    """Values of ``settings.NAME=VALUE`` texts (``--set``), each in the type of the setting.

    ``given`` are settings that another option has stated.

    Raises
    ------
    ConfigError
        All texts that are not of that form, of an unknown setting, of the wrong type or given twice.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    defaults = Settings()
    known = [PREFIX + name for name in Settings.__slots__]
    for text in texts:
        path, separator, value = text.partition("=")
        name = path.removeprefix(PREFIX)
        if path in known and not separator:
            problems.append(f"--set {text!r} must be PATH=VALUE")
        elif path not in known:
            problems.append(f"--set: {path!r} must be one of {PREFIX}NAME=VALUE{did_you_mean(path, known)}")
        elif name in given:
            problems.append(f"{name} is given twice: by its option and by --set {path}")
        else:
            found[name] = _typed(value, getattr(defaults, name), path, problems)
    raise_problems(problems)
    return found


def _typed(text: str, like: object, path: str, problems: list[str]) -> Any:
    if isinstance(like, str):
        return text
    try:
        return int(text) if isinstance(like, int) else float(text)
    except ValueError:
        kind = "a whole number" if isinstance(like, int) else "a number"
        problems.append(f"--set: {path} must be {kind}, got {text!r}")
        return like
