"""Totals of a launch's work."""

from herald_pipeline.demand import demand
from herald_pipeline.stages import Op, OpKind, Repeat


def test_demand_sums_ops_times_repeats() -> None:
    work = (Repeat(3, (Op(OpKind.COPY, h2d_bytes=2.0), Op(OpKind.QKV, gpu_flops=5.0, hbm_bytes=1.0))),)
    total = demand(work)
    assert (total.h2d_bytes, total.gpu_flops, total.hbm_bytes) == (6.0, 15.0, 3.0)
