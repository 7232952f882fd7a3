"""What a method is: a choice on six axes, a template of one block, and the pools it needs."""

from collections.abc import Callable
from dataclasses import dataclass, field

from herald_pipeline.parts import Parts
from herald_pipeline.pools import Pool
from herald_pipeline.settings import Settings
from herald_pipeline.stages import Template


@dataclass(frozen=True, slots=True)
class Axes:
    """The six choices that tell methods apart (one line each, for tables)."""

    full_kv: str
    selection: str
    link: str
    attention: str
    overlap: str
    pools: str


@dataclass(frozen=True, slots=True)
class Method:
    """A way to serve a block dLLM.

    Attributes
    ----------
    build
        Parts (model and settings) -> the template of a block and the pools it uses.
    defaults
        Settings when the user gives none.
    assumptions
        What the papers leave open and how it was decided; printed with every result.
    simulated_only
        Set where no executor can be built (SpeContext needs a trained retrieval model).
    timed_on_synthetic_kv
        Of such a method: its steps can be carried out over random KV, for their time (``ideal``: they attend to what
        was selected at no cost, and nobody selects for free).
    """

    name: str
    summary: str
    axes: Axes
    build: Callable[[Parts], tuple[Template, tuple[Pool, ...]]] = field(repr=False)
    defaults: Settings = field(default_factory=Settings)
    assumptions: tuple[str, ...] = ()
    simulated_only: bool = False
    timed_on_synthetic_kv: bool = False

    def execution_problem(self, *, timed_only: bool = False) -> str | None:
        """Why no executor runs the method, or ``None``; ``timed_only``: it is timed over synthetic KV, unchecked."""
        if not self.simulated_only or (self.timed_on_synthetic_kv and timed_only):
            return None
        timed = ", or timed over synthetic KV (--synthetic-kv, without --check)" if self.timed_on_synthetic_kv else ""
        return f"method {self.name} can only be simulated (`herald-sim run --method {self.name}`){timed}"
