"""Independent replicas of a run on one host, a GPU each: one DRAM for all of them, a link and cores for every one.

A host with several GPUs scales as long as its memory does. Each replica is a simulation of its own; all of them go by
one clock, and what they move competes for the rate of DRAM as the streams of one run do (max-min fairness). GPUs and
links are not shared, nor are cores: the profile says what one replica's threads reach.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from herald_pipeline import validate
from herald_pipeline.capacity import Memory
from herald_pipeline.errors import CapacityError, ConfigError
from herald_pipeline.hardware import Profile
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.result import Result
from herald_pipeline.units import GB
from herald_pipeline.workload import Workload
from herald_sim.clock import Clock
from herald_sim.phases import DRAM, FIRST, Flow, Uses
from herald_sim.resources import Done, Rates, SharedRates, Work
from herald_sim.simulate import conclude, prepare, simulate


@dataclass(frozen=True, slots=True)
class Replicas:
    """One replica by itself, and all of them at once.

    Attributes
    ----------
    alone
        Result of a replica whose host serves no other.
    together
        Result of each while all run.
    """

    alone: Result
    together: tuple[Result, ...]

    @property
    def throughput_tok_s(self) -> float:
        """Tokens a second of all replicas together."""
        return sum(result.throughput_tok_s or 0.0 for result in self.together)

    @property
    def scaling(self) -> float | None:
        """How many times the one alone they deliver; ``None`` where that has no throughput."""
        return self.throughput_tok_s / self.alone.throughput_tok_s if self.alone.throughput_tok_s else None


def simulate_replicas(
    pipeline: Pipeline, profile: Profile, workload: Workload, count: int, *, beyond_memory: bool = False
) -> Replicas:
    """Predict ``count`` replicas of a run on one host, each with its own requests.

    Parameters
    ----------
    profile
        The machine as one replica has it: its GPU and link, its threads, and the DRAM of the whole host.
    workload
        Requests of one replica.
    beyond_memory
        Go on where all of them together do not fit into host memory.

    Raises
    ------
    ConfigError
        ``count`` is below 1.
    CapacityError
        One replica, or all of them, do not fit.
    ProfileError
        The profile lacks a number that the run would read.
    """
    if count < 1:
        raise ConfigError(f"replicas must be >= 1, got {count}")
    alone = simulate(pipeline, profile, workload, beyond_memory=beyond_memory)
    memory = Memory.of(profile)
    needed = count * (alone.dram_bytes or 0.0)
    if needed > memory.dram_bytes and not beyond_memory:
        message = (
            f"{count} replicas keep {needed / GB:.1f} GB in host memory, {memory.dram_bytes / GB:.1f} GB are there"
        )
        raise CapacityError(message)
    validate.check_once(pipeline)
    host = SharedHost()
    runs = [
        prepare(pipeline, profile, workload, None, env=host.clock, flows=host.flows_of(index)) for index in range(count)
    ]
    for run in runs:
        run.simulation.begin()
    host.clock.run()
    for run in runs:
        run.simulation.program_ended()
    mode = f"events, one of {count} replicas on a host"
    return Replicas(alone, tuple(conclude(run, pipeline, profile, workload, memory, mode) for run in runs))


class SharedHost:
    """The clock and the rates of a host that several simulations run on."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._rates = SharedRates(self.clock, self._ended)
        self._told: dict[Work, Done] = {}
        """Work under way -> the simulation that is told of its end."""

    def flows_of(self, replica: int) -> Callable[[Done], Rates]:
        """What a simulation of this number starts its flows with."""
        return lambda done: _Part(self._rates, self._told, done, replica)

    def _ended(self, work: Any, now: int) -> None:
        self._told.pop(work)(work, now)


class _Part:
    """A replica's part of its host's rates: its flows go there under names of their own."""

    def __init__(self, rates: SharedRates, told: dict[Work, Done], done: Done, replica: int) -> None:
        self._rates, self._told, self._done, self._replica = rates, told, done, replica
        self._known: dict[Uses, Uses] = {}

    def start(self, work: Any, flow: Flow, now: int) -> None:
        """Move ``flow``'s bytes for ``work``; the simulation is told of its end."""
        self._told[work] = self._done
        self._rates.start(work, Flow(flow.total_ns, self._own(flow.uses)), now)

    def mark(self, uses: Uses, under_way: bool, now: int) -> None:
        """Something of this replica that its flows may be slower beside is under way from now on, or no more."""
        self._rates.mark(self._own(uses), under_way, now)

    def _own(self, uses: Uses) -> Uses:
        """One object for equal uses: the shared rates know a mix of flows by their identities."""
        own = self._known.get(uses)
        if own is None:
            own = self._known[uses] = tuple((_name(name, self._replica), share) for name, share in uses)
        return own


def _name(resource: str, replica: int) -> str:
    """A rate's name on the host: DRAM is every replica's, everything else its own."""
    return resource if resource in (DRAM, FIRST) else f"{resource} of replica {replica}"
