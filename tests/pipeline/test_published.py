"""The printed numbers: complete, typed, consistent with each other, and nowhere else."""

import importlib
import io
import re
import tokenize
from pathlib import Path

import pytest

from herald_pipeline import catalogue, published
from herald_pipeline.errors import ConfigError
from herald_pipeline.published import Paper, Verdict
from herald_sim.exhibits import NAMES as EXHIBITS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("herald_pipeline", "herald_sim", "herald_exec", "calibration", "reports", "benchmarks")
TABLE_II = {
    (point.model_name, point.context_tokens, point.method_name, point.metric): point.number
    for point in published.find(exhibit="Table II")
}


def test_both_files_are_read_completely():
    rows = [
        len((ROOT / "herald_pipeline" / "published" / f"{p}_published.csv").read_text().splitlines())
        for p in ("herald", "dsb")
    ]
    assert [len(published.points(Paper.HERALD)) + 1, len(published.points(Paper.DSB)) + 1] == rows


def test_every_model_and_method_of_the_tables_has_our_name():
    for exhibit in ("Table I", "Table II", "Fig 13"):
        for point in published.find(exhibit=exhibit):
            assert point.model_name in catalogue.names()
            assert point.method_name
    dsb = {point.model for point in published.points(Paper.DSB) if point.metric in ("accuracy", "throughput")}
    assert {published.MODELS[model] for model in dsb} <= set(catalogue.names())


def test_the_printed_ratios_follow_from_the_printed_throughputs():
    for (model, context, method, metric), value in TABLE_II.items():
        if metric == "throughput_ratio_vs_Dense":
            ratio = (
                TABLE_II[model, context, method, "peak_throughput"]
                / TABLE_II[model, context, "dense", "peak_throughput"]
            )
            assert ratio == pytest.approx(value, abs=0.0051), (model, context, method)


def test_the_printed_averages_follow_from_the_printed_scores():
    for point in published.find(exhibit="Table I", metric="accuracy:avg"):
        where = {"exhibit": "Table I", "model": point.model, "method": point.method, "budget": point.budget}
        scores = [
            other.number
            for other in published.find(**where)
            if other.metric.startswith("accuracy:") and "avg" not in other.metric
        ]
        assert len(scores) == 4
        assert sum(scores) / 4 == pytest.approx(point.number, abs=0.0051)


def test_a_lookup_gives_exactly_one_number_or_says_why_not():
    where = {"exhibit": "Table II", "model_name": "sdar-8b", "method_name": "dense", "metric": "peak_batch"}
    assert published.number(**where, context_tokens=16384) == TABLE_II["sdar-8b", 16384, "dense", "peak_batch"]
    with pytest.raises(ConfigError, match="prints 2 point"):
        published.number(**where)
    with pytest.raises(ConfigError, match="did you mean 'exhibit'"):
        published.number(exibit="Table II")


def test_words_and_points_that_are_only_drawn_are_no_numbers():
    parity = published.find(exhibit="Fig 14", metric="throughput_vs_Dense")
    drawn = published.find(exhibit="Fig 5", method="1-query selection on CPU")
    assert [point.number for point in (*parity, *drawn)] == [None, None]


def significant_digits(point):
    return len(point.value.replace(".", "").lstrip("-0"))


def telling_values():
    """Printed results that no unrelated code would hold by chance: scores, ratios, rates from 400 on."""
    values = set()
    for point in (*published.points(Paper.HERALD), *published.points(Paper.DSB)):
        number, digits = point.number, significant_digits(point)
        if number is None:
            continue
        rate = point.unit in ("tok/s", "TPS") and number >= 400
        score = point.metric.startswith("accuracy") and digits >= 4
        decimal = point.unit in ("tok/s", "TPS", "x") and number % 1 and digits >= 3
        if rate or score or decimal:
            values.add(number)
    return values


def numbers_in(path):
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline):
        if token.type == tokenize.NUMBER and not token.string.lower().startswith("0x"):
            yield token.start[0], complex(token.string.replace("_", "")).real


def test_the_search_for_published_values_would_find_one(tmp_path):
    path = tmp_path / "guilty.py"
    path.write_text(f"expected = {max(telling_values())!r}\n")
    assert [value for _, value in numbers_in(path) if value in telling_values()]
    assert len(telling_values()) > 200


def test_no_published_value_stands_in_code_outside_this_package():
    values = telling_values()
    found = [
        f"{path.relative_to(ROOT)}:{line}: {value:g}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "published" not in path.relative_to(ROOT).parts[:-1]
        for line, value in numbers_in(path)
        if value in values
    ]
    assert found == []


def test_every_claim_is_unique_and_says_how_it_is_tested_or_why_not():
    claims = published.claims()
    assert len({claim.id for claim in claims}) == len(claims)
    for claim in claims:
        assert claim.claim, claim.id
        assert claim.section, claim.id
        assert claim.values, claim.id
        assert claim.machine, claim.id
        assert (claim.verdict is Verdict.NOT_TESTABLE) == (not claim.test), claim.id


def test_a_verdict_comes_with_its_result_and_a_claim_without_one_says_why():
    for claim in published.claims():
        untested = claim.verdict in (Verdict.NOT_TESTED, Verdict.NOT_TESTABLE)
        assert untested == (not claim.result), claim.id
        assert untested == bool(claim.reason), claim.id


def test_both_papers_are_in_the_ledger_and_their_headline_claims_carry_the_printed_values():
    by_id = {claim.id: claim for claim in published.claims()}
    assert {claim.paper for claim in by_id.values()} == set(Paper)
    headline = published.number(exhibit="Abstract", metric="max_speedup_vs_Dense")
    assert by_id["herald-abstract-speedup"].values == (headline,)
    for claim in by_id.values():
        assert claim.id.startswith(claim.paper.value.lower()), claim.id


def test_the_values_of_the_ledger_are_the_values_of_the_tables():
    for paper in Paper:
        printed = {point.number for point in published.points(paper)}
        stated = {
            (claim.id, value)
            for claim in published.claims()
            for value in claim.values
            if claim.paper is paper and isinstance(value, float) and value % 1
        }
        assert {entry for entry in stated if entry[1] not in printed} == set()


def commands_of(tool):
    """Names of a command-line tool's commands and groups."""
    app = importlib.import_module(f"{tool.replace('-', '_')}.cli").app
    return {
        *(one.name or one.callback.__name__ for one in app.registered_commands),
        *(group.name for group in app.registered_groups),
    }


def test_every_test_of_the_ledger_is_a_command_of_ours_or_a_test_that_exists():
    for claim in published.claims():
        words = claim.test.split()
        if words[:3] == ["python", "-m", "pytest"]:
            assert words[4] == "-k", claim.id
            names = re.findall(r"^def (test_\w+)", (ROOT / words[3]).read_text(), re.MULTILINE)
            assert any(words[5] in name for name in (*names, Path(words[3]).stem)), claim.id
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / words[2].replace(".", "/") / "__main__.py").is_file(), claim.id
        elif words[:1] == ["python"]:
            assert (ROOT / words[1]).is_file(), claim.id
        elif words:
            assert words[0] in ("herald-sim", "herald-exec"), claim.id
            assert words[1] in commands_of(words[0]), claim.id
        if words[1:2] == ["exhibit"]:
            assert words[2] in EXHIBITS, claim.id


def test_equation_2_puts_the_representative_query_at_most_half_a_block_from_any_position():
    prefix, block = range(500), 32

    def deviation(position):
        # Offsets p - s against the mean offset of all block positions to the prefix (twice both, to stay whole).
        doubled_mean = sum(2 * (500 + i - s) for i in range(block) for s in prefix) // (block * len(prefix))
        return sum((2 * (500 + position - s) - doubled_mean) ** 2 for s in prefix)

    deviations = [deviation(position) for position in range(block)]
    best = [position for position in range(block) if deviations[position] == min(deviations)]
    assert best == [15, 16]
    assert max(abs(block // 2 - position) for position in range(block)) == 16
