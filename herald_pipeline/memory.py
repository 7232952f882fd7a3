"""Memory of a machine as an engine may use it, and a budget of what is asked of it, with the limit that binds."""

from dataclasses import dataclass
from typing import NamedTuple

from herald_pipeline.errors import check_number, raise_problems
from herald_pipeline.hardware import Profile, known
from herald_pipeline.pools import Home
from herald_pipeline.units import GB, format_bytes


class Item(NamedTuple):
    """One line of a memory budget. ``transient``: comes and goes, on top of what stays."""

    home: Home
    name: str
    num_bytes: float
    what: str
    transient: bool = False


UNLIMITED_BYTES = 1e18
"""A limit that nothing reaches: there is none."""


class Limit(NamedTuple):
    """One memory limit and what is asked of it."""

    name: str
    limit_bytes: float
    needed_bytes: float
    what: str = ""

    @property
    def free_bytes(self) -> float:
        """What is left over; negative when it does not fit."""
        return self.limit_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a machine as an engine may use it, after what the user allows.

    Attributes
    ----------
    resident_bytes
        Device memory for what stays.
    hbm_bytes, dram_bytes
        All device and host memory.
    runtime_bytes
        Device memory that the runtime takes before anything is allocated.
    logit_bytes
        Bytes per logit of the active blocks.
    prefills
        Whether prompts go through the model: synthetic KV is drawn where it stays.
    prompts_wait_in_layer
        Whether requests that are admitted together go through each layer together, as the executor's do: all of their
        prompts are then held, and a ring for each, though one is computed at a time. Otherwise the others wait outside.
    workspace_bytes
        Device memory that libraries keep for themselves once they have been used.
    lands_uploads
        Whether uploads land in a buffer before they are put where attention reads them: one place of the ring, or where
        a layer's full KV is fetched a row's. What the device selects from it is then scored row by row.
    """

    resident_bytes: float
    hbm_bytes: float
    dram_bytes: float
    runtime_bytes: float = 0.0
    logit_bytes: float = 4.0
    prefills: bool = True
    prompts_wait_in_layer: bool = False
    workspace_bytes: float = 0.0
    lands_uploads: bool = False

    @classmethod
    def of(cls, profile: Profile, *, hbm_limit_gb: float | None = None, host_limit_gb: float | None = None) -> "Memory":
        """Memory of a profile, lowered by the limits given."""
        raise_problems(
            check_number(value, path, above=0)
            for path, value in (("hbm_limit_gb", hbm_limit_gb), ("host_limit_gb", host_limit_gb))
            if value is not None
        )
        engine, machine = profile.engine, profile.machine
        hbm = known(machine.gpu.memory_gb).peak * GB
        hbm = hbm if hbm_limit_gb is None else min(hbm, hbm_limit_gb * GB)
        dram = known(machine.dram.capacity_gb).peak * GB
        dram = dram if host_limit_gb is None else min(dram, host_limit_gb * GB)
        runtime = 0.0 if engine.runtime_gb is None else engine.runtime_gb.peak * GB
        share = known(engine.usable_memory_share).peak
        return cls(share * hbm, hbm, dram, runtime, known(engine.logit_bytes).peak)


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of ``batch`` requests: every item, the limits, and which one binds."""

    batch: int
    items: tuple[Item, ...]
    memory: Memory

    def total(self, home: Home, *, transient: bool | None = None) -> float:
        """Bytes of a home's items; ``transient`` picks those that stay or those that come and go."""
        wanted = (item for item in self.items if item.home is home and transient in (None, item.transient))
        return sum(item.num_bytes for item in wanted)

    @property
    def passing_bytes(self) -> float:
        """Device memory of what comes and goes: the widest forward or a prefill, which do not run at one moment."""
        return max((item.num_bytes for item in self.items if item.transient), default=0.0)

    def limits(self) -> tuple[Limit, ...]:
        """Each limit with what is needed of it."""
        stays, passing = self.total(Home.HBM, transient=False), self.passing_bytes
        memory = self.memory
        # Where not even the weights fit, fewer requests do not help, and the name says so.
        weights = sum(item.num_bytes for item in self.items if item.name == "weights")
        resident = "gpu weights" if weights > memory.resident_bytes else "gpu kv"
        return (
            Limit(resident, memory.resident_bytes, stays, "weights, pools and logits in the engine's share"),
            Limit("gpu peak", memory.hbm_bytes, stays + passing + memory.runtime_bytes, "and what comes and goes"),
            Limit("host memory", memory.dram_bytes, self.total(Home.DRAM), "pools in DRAM"),
        )

    @property
    def binding(self) -> Limit:
        """The limit that is shortest, or closest to being so in proportion."""
        return min(self.limits(), key=lambda limit: limit.free_bytes / limit.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether every limit holds."""
        return all(limit.free_bytes >= 0 for limit in self.limits())

    @property
    def kv_bytes_per_request(self) -> float:
        """Pool bytes of one request in both memories."""
        names = ("weights", "retrieval_weights", "logits", "landing", "row_landing", "workspaces")
        return sum(item.num_bytes for item in self.items if item.name not in names and not item.transient) / self.batch

    @property
    def shortage(self) -> str:
        """The limit that binds and by how much, for marks in sweeps; empty when all fits."""
        if self.fits:
            return ""
        limit = self.binding
        return f"{limit.name}, short by {-limit.free_bytes:,.0f} bytes"

    def as_dict(self) -> dict[str, object]:
        """Items and limits as plain values."""
        return {
            "batch": self.batch,
            "fits": self.fits,
            "limit": self.binding.name,
            "items": [
                {"home": item.home.value, "name": item.name, "bytes": item.num_bytes, "transient": item.transient}
                for item in self.items
            ],
            "limits": [
                {"name": limit.name, "limit_bytes": limit.limit_bytes, "needed_bytes": limit.needed_bytes}
                for limit in self.limits()
            ],
        }

    def table(self) -> str:
        """The budget for people: items by home, then each limit with what is left of it."""
        lines = [f"memory of {self.batch} request(s), kv per request {format_bytes(self.kv_bytes_per_request)}"]
        for home in Home:
            for item in self.items:
                if item.home is home and item.num_bytes:
                    mark = "peak" if item.transient else ""
                    lines.append(
                        f"  {home.value:<5}{item.name:<14}{format_bytes(item.num_bytes):>12} {mark:<5}{item.what}"
                    )
        lines += [
            f"  {limit.name}: {format_bytes(limit.needed_bytes)}{_left(limit)} ({limit.what})"
            for limit in self.limits()
        ]
        return "\n".join(lines)


def _left(limit: Limit) -> str:
    if limit.limit_bytes >= UNLIMITED_BYTES:
        return ", no limit"
    left = "left" if limit.free_bytes >= 0 else "SHORT"
    return f" of {format_bytes(limit.limit_bytes)}, {format_bytes(abs(limit.free_bytes))} {left}"
