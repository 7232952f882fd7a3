import numpy as np
import pytest

from herald_pipeline.workload import Workload
from herald_sim.intervals import draws, interval, lower_factor, with_factors

WORKLOAD = Workload.uniform(32768, 80)


def test_an_interval_holds_its_value_and_is_the_same_for_the_same_seed(paper_profile, pipeline_of):
    low, high = interval(pipeline_of("herald"), paper_profile, WORKLOAD, 1000.0)
    assert low < 1000 < high
    assert high - low < 500
    assert interval(pipeline_of("herald"), paper_profile, WORKLOAD, 1000.0) == (low, high)
    assert interval(pipeline_of("herald"), paper_profile, WORKLOAD, 1000.0, seed=1) != (low, high)


def test_numbers_that_trade_off_are_drawn_together(paper_profile):
    drawn = draws(paper_profile, 300)
    experts = np.log([profile.engine.grouped_gemm_efficiency.peak for profile in drawn])
    sampler = np.log([profile.engine.sampler_passes.peak for profile in drawn])
    assert np.corrcoef(experts, sampler)[0, 1] > 0.5


@pytest.mark.parametrize("rank", [5, 3])
def test_the_factor_of_a_covariance_gives_it_back_even_where_numbers_determine_each_other(rank):
    parts = np.random.default_rng(rank).normal(size=(5, rank))
    covariance = parts @ parts.T
    lower = np.zeros((5, 5))
    for at, row in enumerate(lower_factor(covariance.tolist())):
        lower[at, : len(row)] = row
    assert lower @ lower.T == pytest.approx(covariance, abs=1e-6)


def test_draws_of_fitted_numbers_spread_as_their_fit_says(paper_profile):
    from herald_sim.fit_files import ALL, files, read

    fit = read(files(paper_profile)[ALL])
    name = fit["names"][0]
    before = getattr(paper_profile.engine, name).peak
    logs = [np.log(getattr(drawn.engine, name).peak / before) for drawn in draws(paper_profile, 400)]
    assert np.std(logs) == pytest.approx(np.sqrt(fit["covariance"][0][0]), rel=0.15)


def test_shares_stay_shares_and_published_numbers_stay_as_they_are(paper_profile):
    for profile in draws(paper_profile, 50):
        assert profile.engine.select_dram_efficiency.peak <= 1
        assert profile.machine.dram.read_gb_s == paper_profile.machine.dram.read_gb_s


def test_a_factor_of_one_changes_nothing(paper_profile, pipeline_of):
    from herald_sim.fast import evaluate

    same = with_factors(paper_profile, {"engines.sglang-paper.sampler_passes": 1.0})
    assert evaluate(pipeline_of("dense"), same, WORKLOAD) == evaluate(pipeline_of("dense"), paper_profile, WORKLOAD)


def test_what_fast_mode_does_not_cover_has_no_interval(paper_profile, pipeline_of):
    rows = Workload.uniform(4096, 4, policy="first-done-first-out")
    assert interval(pipeline_of("herald"), paper_profile, rows, 1.0) is None


def test_the_relative_spread_of_a_number_that_decides_alone_is_that_of_the_result(paper_profile, pipeline_of):
    # InfiniGen's block is nearly all its scattered fetch.
    low, high = interval(pipeline_of("infinigen"), paper_profile, Workload.uniform(32768, 16), 1.0, samples=200)
    spread = paper_profile.engine.scattered_copy_efficiency.origin.spread
    assert (high - low) / 2 / 1.96 == pytest.approx(spread, rel=0.5)
