"""A decoding loop without a model: confidences are drawn, everything else is the product's."""

from types import SimpleNamespace

import numpy as np
import pytest

LIBRARIES = ["numpy", "torch"]


def as_array(library, values):
    if library == "numpy":
        return np.asarray(values)
    torch = pytest.importorskip("torch")
    return torch.asarray(np.asarray(values))


def as_numpy(values):
    return np.asarray(values)


@pytest.fixture(params=LIBRARIES)
def array(request):
    """Turns nested lists into an array of each library."""
    return lambda values: as_array(request.param, values)


def play(policy, prompt, response, seed=0, library="numpy", max_rounds=None):
    """Run ``policy`` on drawn confidences until every row is done; the rounds as numpy."""
    rng = np.random.default_rng(seed)
    prompt, response = np.asarray(prompt), np.asarray(response)
    width = int((prompt + response).max())
    place = np.arange(width)[None, :]
    masked = (place >= prompt[:, None]) & (place < (prompt + response)[:, None])
    limit = max_rounds or int(response.max()) * 4
    masked = as_array(library, masked)
    state = policy.blocks.start(as_array(library, prompt), as_array(library, response))
    cache = policy.cached.start(state, masked)
    rounds = []
    while not bool(as_numpy(state.done).all()):
        assert len(rounds) < limit, "the loop does not end"
        confidence = rng.random((len(prompt), width))
        delimiter = as_array(library, rng.random((len(prompt), width)) < 0.1)
        scores = as_array(library, confidence)
        upcoming = None
        if policy.cached.needs_upcoming:
            _, upcoming = policy.accept(state, None, masked, scores)
        plan = policy.cached.plan(cache, state, masked, upcoming=upcoming)
        opened, accepted = policy.accept(
            state, plan, masked, scores, entropy=as_array(library, 1 - confidence), delimiter=delimiter
        )
        after, cache = policy.advance(cache, plan, opened, masked, accepted)
        rounds.append(
            SimpleNamespace(
                s=as_numpy(opened.s),
                e=as_numpy(opened.e),
                U=as_numpy(opened.U),
                done=as_numpy(opened.done),
                masked=as_numpy(masked),
                accepted=as_numpy(accepted),
                plan=plan,
                opened=opened,
                next_s=as_numpy(after.s),
                next_e=as_numpy(after.e),
                next_U=as_numpy(after.U),
                confidence=confidence,
            )
        )
        masked = masked & ~accepted
        state = after
    return rounds


@pytest.fixture(name="play", scope="session")
def play_fixture():
    return play
