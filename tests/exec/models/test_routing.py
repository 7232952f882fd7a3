"""Expert routing against the stock router and against a loop in float64."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from herald_exec.models.layers import experts_forward, route
from herald_pipeline.model import MoeShape

LLADA2 = MoeShape(
    num_experts=256,
    experts_per_token=8,
    expert_intermediate_size=8,
    num_groups=8,
    groups_per_token=4,
    routed_scaling=2.5,
    gate="sigmoid",
)


def stock_router(moe, hidden_size):
    config = transformers.Glm4MoeConfig(
        hidden_size=hidden_size,
        num_local_experts=moe.num_experts,
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        n_group=moe.num_groups,
        topk_group=moe.groups_per_token,
        routed_scaling_factor=moe.routed_scaling,
        norm_topk_prob=moe.normalise_weights,
    )
    return Glm4MoeTopkRouter(config)


def reference_route(logits, bias, moe):
    """Research section 1.2, one token at a time in float64: ``{expert: weight}`` per token."""
    result = []
    for row in logits.double().numpy():
        score = 1 / (1 + np.exp(-row))
        choice = score + (0 if bias is None else bias.double().numpy())
        size = moe.num_experts // moe.num_groups
        group = [np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(moe.num_groups)]
        best = set(np.argsort(group)[-moe.groups_per_token :])
        ranked = sorted((e for e in range(moe.num_experts) if e // size in best), key=lambda e: -choice[e])
        chosen = ranked[: moe.experts_per_token]
        total = sum(score[e] for e in chosen) if moe.normalise_weights else 1
        result.append({e: score[e] / total * moe.routed_scaling for e in chosen})
    return result


def as_dicts(experts, weights):
    return [dict(zip(e, w, strict=True)) for e, w in zip(experts.tolist(), weights.tolist(), strict=True)]


@pytest.mark.parametrize("normalise", [True, False])
def test_grouped_sigmoid_routing_follows_the_published_rule(normalise):
    moe = replace(LLADA2, normalise_weights=normalise)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 256, generator=generator)
    bias = 0.3 * torch.randn(256, generator=generator)
    ours = as_dicts(*route(logits, bias, moe))
    for got, expected in zip(ours, reference_route(logits, bias, moe), strict=True):
        assert got == pytest.approx(expected, rel=1e-5)


def test_near_ties_route_as_the_stock_router_does():
    """Scores in threes, which do not fill eight places evenly, differ far below what bf16 can hold."""
    generator = torch.Generator().manual_seed(2)
    hidden, bias = torch.randn(64, 32, generator=generator), 0.3 * torch.randn(256, generator=generator)
    weight = torch.randn(256, 32, generator=generator) / 32**0.5
    triple = torch.arange(256) // 3
    weight = weight[triple] * (1 + 3e-7 * (torch.arange(256) % 3))[:, None]
    bias = bias[triple]
    router = stock_router(LLADA2, 32)
    router.weight.copy_(weight)
    router.e_score_correction_bias.copy_(bias)
    _, expected_weights, expected_experts = router(hidden)
    experts, weights = route(hidden @ weight.T, bias, LLADA2)
    for got, expected in zip(as_dicts(experts, weights), as_dicts(expected_experts, expected_weights), strict=True):
        assert got == pytest.approx(expected, rel=1e-6)
    rounded, _ = route((hidden @ weight.T).bfloat16().float(), bias, LLADA2)
    assert (rounded.sort().values != experts.sort().values).any()


def test_bias_decides_who_and_never_how_much():
    moe = MoeShape(
        num_experts=4, experts_per_token=1, expert_intermediate_size=1, gate="sigmoid", normalise_weights=False
    )
    experts, weights = route(torch.zeros(1, 4), torch.tensor([0.0, 0.0, 5.0, 0.0]), moe)
    assert experts.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_negative_choices_stay_within_the_best_groups():
    """With all biased scores below zero, a masked expert must not win by being zero."""
    moe = MoeShape(
        num_experts=4, experts_per_token=2, expert_intermediate_size=1, num_groups=2, groups_per_token=1, gate="sigmoid"
    )
    experts, _ = route(torch.zeros(1, 4), torch.tensor([-3.0, -3.0, -2.0, -2.0]), moe)
    assert sorted(experts[0].tolist()) == [2, 3]


def test_softmax_gate_weights_are_the_top_probabilities():
    moe = MoeShape(num_experts=4, experts_per_token=2, expert_intermediate_size=1, normalise_weights=False)
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert as_dicts(*route(logits, None, moe)) == [pytest.approx({1: 0.4, 3: 0.3}, rel=1e-6)]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
def test_experts_sum_as_a_loop_over_tokens_does(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 6, generator=generator, dtype=torch.float64)
    gate_up = torch.randn(9, 10, 6, generator=generator, dtype=torch.float64)
    down = torch.randn(9, 6, 5, generator=generator, dtype=torch.float64)
    experts = torch.stack([torch.randperm(9, generator=generator)[:3] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, 3, generator=generator, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for token, slot in itertools.product(range(num_tokens), range(3)):
        expert = experts[token, slot]
        gate, up = (gate_up[expert] @ x[token]).split(5)
        expected[token] += weights[token, slot] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    torch.testing.assert_close(experts_forward(x, gate_up, down, experts, weights), expected)
