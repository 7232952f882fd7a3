"""Scores of answers, with cases written out by hand."""

import math

import pytest
from scipy.stats import binomtest

from herald_exec.reference.scoring import score_answer, wilson_interval


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" the code of a b is 48213.", True),
        (" 48213 is the code of a b", True),
        ("48213", True),
        (" the code of a b is 482130.", False),
        (" the code of a b is 148213.", False),
        (" the code of a b is 4821.", False),
        ("", False),
    ],
)
def test_a_value_counts_only_where_it_stands_alone(answer, right):
    assert score_answer("kv", ["48213"], answer).exact == right


def test_a_value_counts_when_it_also_stands_inside_a_longer_number():
    assert score_answer("kv", ["12"], "112 and 12").exact == 1


def test_partial_is_the_share_of_fields_found():
    score = score_answer("multi", ["11111", "22222", "33333", "44444"], " a: 22222; b: 44444; c: 9")
    assert score == (0, 0.5)


def test_the_order_of_fields_is_free():
    fields = ['"item": "12345"', '"ms": "54321"']
    assert score_answer("log", fields, ' {"ms": "54321", "item": "12345"}') == (1, 1)


def test_a_recited_passage_must_be_the_whole_answer():
    passage = ["the quick brown fox"]
    assert score_answer("rec", passage, " the quick  brown\nfox") == (1, 1)
    assert score_answer("rec", passage, " the quick brown fox jumps").exact == 0
    assert score_answer("rec", passage, " the quick green fox") == (0, 0.75)


@pytest.mark.parametrize(("successes", "trials"), [(0, 20), (20, 20), (13, 20), (190, 200), (1, 1)])
def test_the_interval_is_wilsons(successes, trials):
    expected = binomtest(successes, trials).proportion_ci(method="wilson")
    found = wilson_interval(successes, trials)
    assert found.value == successes / trials
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_no_samples_say_nothing():
    found = wilson_interval(0, 0)
    assert math.isnan(found.value)
    assert (found.low, found.high) == (0, 1)
