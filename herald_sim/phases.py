"""What a launch is made of for the resources: kernels on the GPU, flows on shared rates, and the names of these."""

from dataclasses import dataclass
from typing import Literal

DRAM, H2D, D2H, DUPLEX = "dram", "h2d", "d2h", "duplex"
RETRIEVAL_CORES = "retrieval cores"
FIRST = "goes first"
"""Among a flow's uses: it takes what it needs of its rates before flows without it do."""
SCAN = "scan"
"""Among a flow's uses: it is a selection's pass over the KV."""
KERNELS = "kernels"
"""In place of a flow's uses: kernels are under way on the GPU (:meth:`~herald_sim.resources.SharedRates.mark`)."""
BESIDE = "beside "
"""Before such a name, with a speed: the flow is no faster while one with that name is under way."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Work on the GPU: ``total_ns`` alone, as kernels between which another stream's kernels can run.

    ``kernel_ns`` is the mean time of one. ``wait_ns`` is what another stream's kernel waits for, in which long kernels
    count for more: the power mean of order 3. The kernel that a random moment falls into would be the mean over time,
    which comes near it but gets longer if only short kernels get shorter; this one never does. Where the profile says
    how long a thread block runs, no kernel counts for more than that: a priority stream's kernel gets its place then.
    All of it takes ``beside_fetch`` times as long while a fetch holds multiprocessors (:attr:`Flow.holds_gpu`).
    """

    total_ns: int
    kernel_ns: float
    wait_ns: float
    beside_fetch: float = 1.0
    on_gpu: Literal[True] = True


Uses = tuple[tuple[str, float], ...]
"""Shared rates by name, and the share of each that a flow takes at full speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Work that moves bytes: ``total_ns`` alone; ``uses`` says which share of each shared rate it takes then.

    ``holds_gpu``: programs of the device do it, which keep multiprocessors from kernels meanwhile.
    """

    total_ns: int
    uses: Uses
    holds_gpu: bool = False
    on_gpu: Literal[False] = False


Phase = Kernels | Flow


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """Phases of a launch, one after another; with the bytes of its resource and its FLOPs, and bytes per link."""

    phases: tuple[Phase, ...]
    num_bytes: float
    flops: float
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    dram_bytes: float = 0.0

    @property
    def total_ns(self) -> int:
        """Time of the launch when nothing else runs."""
        return sum(phase.total_ns for phase in self.phases)
