"""What ``calibration measure`` does otherwise on a GPU: the executor's own kernels and graphs, at its sizes.

Without a GPU the executor runs torch's operations one by one, and the parts time those. On a GPU it runs Triton kernels
inside a graph; timing anything else would describe another program. Each module here serves the part of its name.
"""
