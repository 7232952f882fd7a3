from collections.abc import Callable

import pytest

from herald_pipeline import catalogue, hardware_io
from herald_pipeline.hardware import Profile
from herald_pipeline.pipeline import Pipeline, build
from herald_pipeline.result import Result
from herald_pipeline.workload import Workload
from herald_sim.simulate import simulate

HARDWARE = "h100-sxm-80g_xeon-8481c"


@pytest.fixture(scope="session")
def paper_profile() -> Profile:
    return hardware_io.resolve(HARDWARE)


@pytest.fixture(scope="session")
def changed_profile() -> Callable[..., Profile]:
    """The paper's profile with ``path=value`` overrides."""

    def make(*overrides: str) -> Profile:
        return hardware_io.resolve(HARDWARE, None, overrides)

    return make


@pytest.fixture(scope="session")
def pipeline_of() -> Callable[..., Pipeline]:
    def make(method: str, model: str = "llada2-mini", **settings: object) -> Pipeline:
        return build(catalogue.get(model), method, **settings)

    return make


@pytest.fixture(scope="session")
def run(paper_profile: Profile, pipeline_of: Callable[..., Pipeline]) -> Callable[..., Result]:
    """A short simulated run with the invariants on, memory limits left out."""

    def simulated(
        method: str,
        *,
        model: str = "llada2-mini",
        context: int = 32768,
        batch: int = 8,
        blocks: int = 4,
        profile: Profile | None = None,
        steps: object = 20,
        policy: str = "lockstep",
        **settings: object,
    ) -> Result:
        workload = Workload.uniform(context, batch, gen_tokens=32 * blocks, steps=steps, policy=policy)  # type: ignore[arg-type]
        pipeline = pipeline_of(method, model, **settings)
        return simulate(pipeline, profile or paper_profile, workload, beyond_memory=True, check=True)

    return simulated
