"""Exact index sets: by the definition, and by an independent sort."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from herald_exec import kernels
from herald_exec.kernels.checking import adversarial_rows, check_topk


def by_sorting(values, k):
    """Python's stable sort on (is NaN, -value): equal values keep their order."""
    order = sorted(
        range(len(values)),
        key=lambda i: (
            bool(np.isnan(values[i])),
            -float(np.nan_to_num(values[i], nan=0.0, posinf=np.inf, neginf=-np.inf)),
        ),
    )
    return sorted(order[:k])


def test_adversarial_rows_are_selected_exactly(tier):
    assert check_topk() == []


@pytest.mark.parametrize(
    ("name", "row"), list(adversarial_rows(3000)), ids=[name for name, _ in adversarial_rows(3000)]
)
def test_the_definition_agrees_with_a_stable_sort(name, row):
    values = row.astype(np.float32)
    assert kernels.reference.topk(values, 150).tolist() == by_sorting(values, 150)


@settings(deadline=None, max_examples=200)
@given(
    arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=True, allow_infinity=True)),
    st.integers(0, 310),
)
def test_any_row_is_selected_exactly(values, k):
    expected = by_sorting(values, k)
    assert kernels.topk(values, k).tolist() == expected
    assert kernels.topk(values, k, heap=True).tolist() == expected


def test_a_misleading_sample_still_gives_the_exact_set(tier):
    length = 32 * 1024
    values = np.zeros(length, np.float32)
    values[:: length // 1024] = np.arange(1024) + 1.0  # the sampled positions hold all that is large
    assert kernels.topk(values, 5000).tolist() == by_sorting(values, 5000)
