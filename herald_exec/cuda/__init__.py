"""The executor on a GPU: CUDA streams for streams, a graph for a forward, Triton kernels inside it.

:func:`open_device` is all that the rest of the executor knows of it. With ``check`` every access is checked against the
positions that pools keep on the host, and policies that read whole logits need them: both run the CPU's actions on the
device's streams, with the same results and at a fraction of the speed; :func:`fused_problem` says which it will be.
"""

from collections.abc import Mapping

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
    if session.pools.partial is not None:
        return "partial keys are written by the plain actions"
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
    if problem is None:
        from herald_exec.cuda.actions import DeviceActions

        try:
            actions = DeviceActions(session).table()
        except RuntimeError as error:
            message = f"preparing {session.device}: {error}; lower the batch or the context"
            raise RunError(message) from error
    priority = {stream.name for stream in streams if stream.high_priority}
    names = [stream.name for stream in streams]
    return CudaStreams(names, session.device, high_priority=priority, cores=cores), actions
