"""The split of selection times into overhead, bytes and FLOPs, on times made from known costs."""

import pytest

from calibration.parts.selection import Point, size_curve, split

POINTS = [Point(rows, context, x) for x in (1, 4, 32) for rows, context in ((1, 256), (1, 4096), (4, 4096))]
BYTES = {p.name: p.rows * p.context * 1024.0 for p in POINTS}
FLOPS = {p.name: p.rows * p.context * p.queries * 4096.0 for p in POINTS}


def times(overhead, per_byte, per_flop):
    return {p.name: overhead + per_byte * BYTES[p.name] + per_flop * FLOPS[p.name] for p in POINTS}


def test_known_costs_are_found_again():
    overhead, per_byte, per_flop = split(POINTS, times(20e-6, 1e-10, 2e-11), BYTES, FLOPS, least_per_byte=5e-11)
    assert overhead == pytest.approx(20e-6, rel=0.01)
    assert per_byte == pytest.approx(1e-10, rel=0.01)
    assert per_flop == {x: pytest.approx(2e-11, rel=0.01) for x in (1, 4, 32)}


def test_a_byte_never_costs_less_than_memory_allows():
    _, per_byte, _ = split(POINTS, times(20e-6, 1e-12, 2e-11), BYTES, FLOPS, least_per_byte=5e-11)
    assert per_byte == 5e-11


def test_times_of_the_largest_points_are_given_back_exactly():
    made = times(20e-6, 1e-10, 2e-11)
    made["4x4096 x=32"] *= 0.5
    overhead, per_byte, per_flop = split(POINTS, made, BYTES, FLOPS, least_per_byte=5e-11)
    name = "4x4096 x=32"
    assert overhead + per_byte * BYTES[name] + per_flop[32] * FLOPS[name] == pytest.approx(made[name])


def test_smaller_selections_of_many_queries_take_as_many_times_as_long_as_they_were_made_to():
    many = [p for p in POINTS if p.queries == 32]
    made = times(0.0, 1e-10, 2e-11)
    made["1x256 x=32"] += FLOPS["1x256 x=32"] * 2e-11
    reading = {size: size * 1e-10 for size in BYTES.values()}
    y, at = size_curve(many, made, BYTES, FLOPS, reading, 2e-11)
    assert at == tuple(sorted({BYTES[p.name] for p in many}))
    assert y == pytest.approx((2.0, 1.0, 1.0))


def test_two_selections_of_the_same_bytes_share_the_mean_of_what_they_take():
    few, many = Point(1, 4096, 32), Point(4, 1024, 32)
    seconds = {few.name: 3.0, many.name: 5.0}
    alike = {few.name: 1.0, many.name: 1.0}
    assert size_curve([few, many], seconds, alike, alike, {1.0: 1.0}, 1.0) == ((3.0,), (1.0,))
