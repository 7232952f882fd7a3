"""A link slower than the machine's: copies wait until a token bucket of a given rate has let their bytes through.

Each direction has its own bucket, as a bus has. A copy's stage ends no earlier than its bytes take at that rate from
where the direction was free. Its stream's thread waits, on a GPU for the device first, so that what waits for the copy
waits as long. Not held back: queries and attention outputs, a few bytes that leave and arrive inside stages of the GPU,
and prefill's synthetic KV, which crosses no link.
"""

import time
from collections.abc import Callable, Mapping

import torch

from herald_exec.session import ACTIONS, Action, Session, Task
from herald_pipeline.pipeline import Pipeline

_DIRECTIONS = ("h2d", "d2h")


class Bucket:
    """When the next bytes of one direction may have passed; ``now_s`` and ``sleep`` are injected by tests."""

    def __init__(
        self,
        rate_gb_s: float,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate_gb_s = rate_gb_s
        self._now_s, self._sleep = now_s, sleep
        self._free_s = float("-inf")

    def now_s(self) -> float:
        """The bucket's clock."""
        return self._now_s()

    def hold(self, begun_s: float, num_bytes: float) -> None:
        """Wait until ``num_bytes`` that began at ``begun_s`` have passed at the rate, behind those before them."""
        self._free_s = max(self._free_s, begun_s) + num_bytes / (self.rate_gb_s * 1e9)
        left = self._free_s - self._now_s()
        if left > 0:
            self._sleep(left)


def paced(pipeline: Pipeline, actions: Mapping[str, Action] | None, rate_gb_s: float) -> dict[str, Action]:
    """``actions`` with those of the copy stages held back to ``rate_gb_s`` GB/s (above 0) in each direction."""
    found = dict(actions or {})
    buckets = {direction: Bucket(rate_gb_s) for direction in _DIRECTIONS}
    for stage in pipeline.template.stages():
        if stage.resource in buckets and stage.action in {**ACTIONS, **found}:
            inner = (actions or {}).get(stage.action) or ACTIONS[stage.action]
            found[stage.action] = _held(inner, buckets[stage.resource])
    return found


def _held(inner: Action, bucket: Bucket) -> Action:
    def carry_out(session: Session, task: Task) -> object:
        # What the copy waits for must not count as its time.
        _wait_for_device(session)
        begun_s, before = bucket.now_s(), task.num_bytes
        value = inner(session, task)
        _wait_for_device(session)
        bucket.hold(begun_s, task.num_bytes - before)
        return value

    return carry_out


def _wait_for_device(session: Session) -> None:
    if session.device.type == "cuda":
        torch.cuda.current_stream(session.device).synchronize()
