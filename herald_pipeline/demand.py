"""What a launch asks of the machine in all: the bytes and FLOPs of its operations, added up."""

from dataclasses import dataclass

from herald_pipeline.stages import Work


@dataclass(slots=True)
class Demand:
    """Totals of a launch's work: bytes on each resource and FLOPs."""

    hbm_bytes: float = 0.0
    dram_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    gpu_flops: float = 0.0
    cpu_flops: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs on both processors."""
        return self.gpu_flops + self.cpu_flops

    def traced_bytes(self, resource: str) -> float:
        """The bytes that a span of ``resource`` counts: KV moved or read there."""
        return {
            "gpu": self.hbm_bytes,
            "cpu": self.dram_bytes,
            "h2d": self.h2d_bytes,
            "d2h": self.d2h_bytes,
        }[resource]


def demand(work: Work) -> Demand:
    """Totals of ``work``."""
    total = Demand()
    for repeat in work:
        for op in repeat.ops:
            total.hbm_bytes += repeat.count * op.hbm_bytes
            total.dram_bytes += repeat.count * op.dram_bytes
            total.h2d_bytes += repeat.count * op.h2d_bytes
            total.d2h_bytes += repeat.count * op.d2h_bytes
            total.gpu_flops += repeat.count * op.gpu_flops
            total.cpu_flops += repeat.count * op.cpu_flops
    return total
