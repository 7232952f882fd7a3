"""The executor on a GPU: CUDA streams for streams, a graph for a forward, Triton kernels inside it.

:func:`open_device` is all that the rest of the executor knows of it. With ``check`` every access is checked against the
positions that pools keep on the host, and policies that read whole logits need them: both run the CPU's actions on the
device's streams, with the same results and at a fraction of the speed; :func:`fused_problem` says which it will be.
"""

from collections.abc import Callable, Mapping

from herald_exec.cuda.streams import CudaStreams
from herald_exec.session import Action, Session
from herald_pipeline.errors import RunError

__all__ = ["CudaStreams", "fused_problem", "open_device"]


def fused_problem(session: Session) -> str | None:
    """Why a session cannot use the fused forward, or ``None`` when it does."""
    try:
        from herald_exec.cuda.acceptance import policy_problem
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return "Triton is not installed (it comes with the CUDA builds of PyTorch)"
    if session.window > session.block_length:
        return "a window that slides is decoded by the plain actions"
    if session.pools.shadow is not None:
        return "low-rank keys are read by the plain actions"
    if any(stage.action == "fetch" for stage in session.pipeline.template.stages()):
        full = session.pools.hosts["full"]
        if full.dtype is not session.model.kv_dtype:
            return "the host keeps KV in another format than the device"
        return "check keeps positions on the host" if session.pools.check else policy_problem(session.policy)
    actions = {stage.action for stage in session.pipeline.template.stages()}
    if "proxy" in actions:
        # Rows that the device reads itself it reads as they lie there.
        if "fetch_rows" in actions and session.pools.hosts["full"].dtype is not session.model.kv_dtype:
            return "the host keeps KV in another format than the device"
        return "check keeps positions on the host" if session.pools.check else policy_problem(session.policy)
    held = [session.pools.stores.get(name) for name in ("full", "exact", "sparse")]
    if not all(any(store is not None and store.holds(layer) for store in held) for layer in range(session.num_layers)):
        return "steps go layer by layer over KV that is brought to the device"
    if session.pools.check:
        return "check keeps positions on the host"
    return policy_problem(session.policy)


def open_device(
    session: Session, cores: Mapping[str, frozenset[int]] | None = None
) -> tuple[CudaStreams, dict[str, Action]]:
    """Streams on the session's GPU, and the actions that it carries out in its own way."""
    streams = session.pipeline.template.streams
    problem = fused_problem(session)
    session.path = "fused" if problem is None else f"unfused: {problem}"
    actions: dict[str, Action] = {}
    on_close: Callable[[], None] = lambda: None  # noqa: E731 - nothing to free
    if problem is None:
        from herald_exec.cuda.actions import DeviceActions

        try:
            device = DeviceActions(session)
        except RuntimeError as error:
            message = f"preparing {session.device}: {error}; lower the batch or the context"
            raise RunError(message) from error
        actions, on_close = device.table(), device.close
    priority = {stream.name for stream in streams if stream.high_priority}
    names = [stream.name for stream in streams]
    return CudaStreams(names, session.device, high_priority=priority, cores=cores, on_close=on_close), actions
