"""The neutral description: what is served, how, on what, and what came of it.

Everything both interpreters share lives here: model shapes, workloads, machines, stages, streams, pools,
methods, decoding and batch policies, capacity, the trace and the result. It imports neither simpy nor torch.
"""
