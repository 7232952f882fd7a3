"""Constant load: what the device loses where it never rests. On a CPU that plays the GPU there is nothing to find."""

from calibration.bench import Bench, Part


def measure(bench: Bench) -> Part:
    """Time of a pass with rests over its time without them."""
    part = Part("load")
    if bench.fused:
        from calibration.gpu import load

        load.measure(bench, part)
    return part
