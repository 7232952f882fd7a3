"""Triton kernels of the denoising forward: one launch where PyTorch would take five to twenty.

Each function takes and fills tensors and reads nothing back to the host, so that a whole forward can be captured in a
graph. They are checked against float64 references, in Triton's interpreter where there is no GPU.
"""
