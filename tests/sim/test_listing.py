"""What ``herald-sim models`` and ``hardware`` print: said once, no size rounded to nothing."""

import re

from herald_pipeline import methods
from herald_sim.listing import hardware_rows, hardware_text, model_rows, models_text, quantities_text

MEASURED = "h200-141g_emr-16vcpu-8"
OF_A_DENSE_MODEL = "h200x2-141g_emr-32vcpu-2"


def words(text):
    return " ".join(text.split())


def test_a_small_model_s_parameters_are_not_rounded_to_nothing():
    tiny = next(line.split() for line in models_text(model_rows()).splitlines() if line.startswith("tiny "))
    assert 0 < float(tiny[4]) < 0.001
    assert float(tiny[5]) == 0.5


def test_the_command_that_measured_a_profile_stands_there_once():
    rows = hardware_rows(MEASURED)
    text = words(quantities_text(rows[0]))
    commands = [one["rests_on"] for one in rows[0]["quantities"] if "calibration measure" in one["rests_on"]]
    common = max(commands, key=commands.count)
    assert commands.count(common) > 20
    assert text.count(common) == 1
    assert f"measured, where nothing stands below: {common}" in text


def test_a_number_that_rests_on_something_else_says_so_below_it():
    text = words(quantities_text(hardware_rows(MEASURED)[0]))
    assert re.search(r"machine\.cpu\.peak_tflop_s = [\d.]+ TFLOP/s, measured python benchmarks/bench_kernels\.py", text)


def test_a_profile_of_published_numbers_keeps_a_source_for_each():
    text = quantities_text(hardware_rows("h100-sxm-80g_xeon-8481c")[0])
    assert "where nothing stands below" not in text
    assert text.count("HERALD, section VI-A") > 2


def test_what_a_profile_lacks_is_said_once_for_all_methods_that_need_it():
    row = hardware_rows(OF_A_DENSE_MODEL)[0]
    text = words(hardware_text([row]))
    assert text.count("grouped_gemm_efficiency") == 1
    assert "for every method of a mixture of experts" in text
    assert "none (of models without experts: cpu-exact, dense," in text


def test_a_profile_that_prices_every_model_says_nothing_about_experts():
    row = hardware_rows(MEASURED)[0]
    assert row["methods_without_experts"] == row["methods"] == list(methods.names())
    assert "experts" not in hardware_text([row])
