"""A round of any policy needs no value on the host: it can be captured in a CUDA graph, and numpy needs no torch."""

import subprocess
import sys

import pytest

from herald_pipeline.decoding import acceptance, caches, schedulers
from herald_pipeline.decoding.policy import combination_problem, make_policy
from herald_pipeline.decoding.sampling import Sampler

torch = pytest.importorskip("torch")
fake = pytest.importorskip("torch._subclasses.fake_tensor")


def one_round(policy):
    """A round on tensors without values: anything that reads one raises."""
    prompt = torch.tensor([3, 0])
    response = torch.tensor([9, 5])
    masked = torch.ones(2, 12, dtype=torch.bool)
    logits = torch.rand(2, 12, 7)
    choice = Sampler(temperature=0.7, top_p=0.9, mask_token_id=6)(
        logits, seed=prompt, position=torch.arange(12)[None, :], step=response, with_entropy=True
    )
    state = policy.blocks.start(prompt, response)
    cache = policy.cached.start(state, masked)
    plan = policy.cached.plan(cache, state, masked, upcoming=masked, predecessor=True)
    opened, accepted = policy.accept(
        state, plan, masked, choice.confidence, entropy=choice.entropy, delimiter=choice.token == 1
    )
    return policy.advance(cache, plan, opened, masked, accepted)


COMBINATIONS = [
    *((decoder, "fixed", "none") for decoder in acceptance.names()),
    *(("confidence", scheduler, "dual") for scheduler in schedulers.names()),
    *(
        (decoder, "dsb-greedy", cache)
        for cache in caches.names()
        for decoder in ("confidence", "random")
        if combination_problem(decoder, "dsb-greedy", cache, bidirectional=True) is None
    ),
]


@pytest.mark.parametrize(("decoder", "scheduler", "cache"), COMBINATIONS)
def test_a_round_reads_no_value_back(decoder, scheduler, cache):
    policy = make_policy(decoder, scheduler, cache, steps=4)
    with fake.FakeTensorMode():
        state, _ = one_round(policy)
    assert state.s.shape == (2,)


def test_the_instrument_notices_a_value_that_is_read_back():
    with fake.FakeTensorMode(), pytest.raises(fake.DataDependentOutputException):
        bool(torch.ones(2).any())


@pytest.mark.cuda
@pytest.mark.parametrize(("decoder", "scheduler", "cache"), COMBINATIONS)
def test_a_round_is_captured_in_a_graph(decoder, scheduler, cache):
    policy = make_policy(decoder, scheduler, cache, steps=4)
    masked = torch.ones(2, 12, dtype=torch.bool, device="cuda")
    masked[0, :3] = False
    masked[1, 5:] = False
    confidence = torch.rand(2, 12, device="cuda")
    state = policy.blocks.start(torch.tensor([3, 0], device="cuda"), torch.tensor([9, 5], device="cuda"))
    memory = policy.cached.start(state, masked)

    def decide():
        plan = policy.cached.plan(memory, state, masked, upcoming=masked)
        opened, accepted = policy.accept(
            state, plan, masked, confidence, entropy=1 - confidence, delimiter=confidence > 0.8
        )
        after, _ = policy.advance(memory, plan, opened, masked, accepted)
        return accepted, after.s, after.e

    expected = [value.clone() for value in decide()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        decide()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decide()
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((a == b).all()) for a, b in zip(captured, expected, strict=True))


def test_numpy_policies_do_not_import_torch():
    code = (
        "import sys, numpy as np\n"
        "from herald_pipeline.decoding.policy import make_policy\n"
        "policy = make_policy('confidence', 'dsb-greedy', 'dsb')\n"
        "masked = np.ones((1, 8), dtype=bool)\n"
        "state = policy.blocks.start(np.asarray([0]), np.asarray([8]))\n"
        "cache = policy.cached.start(state, masked)\n"
        "plan = policy.cached.plan(cache, state, masked)\n"
        "opened, accepted = policy.accept(state, plan, masked, np.full((1, 8), 0.99))\n"
        "assert accepted.all(), accepted\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
