"""Memory limits that the user states: what admission may hand out, or why the run is refused before it allocates."""

import typer

from herald_exec.footprint import run_memory
from herald_pipeline import capacity
from herald_pipeline.errors import CapacityError, check_number, raise_problems
from herald_pipeline.memory import UNLIMITED_BYTES, Memory
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.room import admission_room
from herald_pipeline.units import GB
from herald_pipeline.workload import Workload


def kv_room(
    pipeline: Pipeline,
    lengths: Workload,
    hbm_limit_gb: float | None,
    host_limit_gb: float | None,
    *,
    on_gpu: bool = False,
    synthetic: bool = False,
    fused: bool = False,
) -> int | None:
    """KV entries that admission may hand out within the limits (:func:`~herald_pipeline.room.admission_room`)."""
    if hbm_limit_gb is None and host_limit_gb is None:
        return None
    raise_problems(
        check_number(value, name, above=0)
        for name, value in (("hbm_limit_gb", hbm_limit_gb), ("host_limit_gb", host_limit_gb))
        if value is not None
    )
    hbm = UNLIMITED_BYTES if hbm_limit_gb is None else hbm_limit_gb * GB
    host = UNLIMITED_BYTES if host_limit_gb is None else host_limit_gb * GB
    memory = run_memory(hbm, host, pipeline, on_gpu=on_gpu, synthetic=synthetic, fused=fused)
    room = admission_room(pipeline, lengths, memory)
    if room is not None:
        said = _reserves_more(pipeline, lengths, memory, room)
        # A host hands out pages as they are written; a device's pools are there as a whole from the start.
        if said and on_gpu:
            raise CapacityError(said)
        if said:
            typer.echo(f"note: {said}", err=True)
    return room


def _reserves_more(pipeline: Pipeline, lengths: Workload, memory: Memory, room: int) -> str | None:
    """What to say where slots with room for the longest request each pass a limit that the requests themselves keep.

    A slot's pools are laid out once, for the longest request that is served.
    """
    sizes = [request.padded_tokens(lengths.block_length) for request in lengths.blocked()]
    longest = max(size for size in sizes if size <= room)
    found = capacity.budget(pipeline, longest, lengths.batch, memory)
    if found.fits:
        return None
    slots = capacity.largest_batch(pipeline, longest, memory)
    within = f"; --batch {slots} stays within" if slots else ""
    return (
        f"what requests hold stays within the limits, but {lengths.batch} slots with room for the longest one "
        f"({longest:,} tokens) reserve more: {found.shortage}{within}"
    )
