"""The executor: runs a pipeline for real with torch and the CPU kernels."""
