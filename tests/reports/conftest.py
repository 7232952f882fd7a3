import pytest


def figure(measured, predicted, **others):
    return {
        "quantity": "x",
        "measured": measured,
        "predicted": predicted,
        "error": predicted / measured - 1,
        "runs": 3,
        "spread": 0.02,
    } | others


def report_point(method, context, batch, measured, predicted, set_="held-out"):
    return {
        "method": method,
        "context": context,
        "batch": batch,
        "steps": 4,
        "blocks": 3,
        "block_length": 32,
        "kv_dtype": "bf16",
        "set": set_,
        "drift": 1.1,
        "figures": {"throughput_tok_s": figure(measured, predicted)},
        "stages": {
            "denoise": figure(0.010, 0.011, share=0.95),
            "select": figure(0.002, 0.001, share=0.03),
        },
        "notes": [],
    }


@pytest.fixture
def document():
    """What calibration reconcile writes."""
    errors = {"median_error": 0.05, "worst_error": 0.1, "within_bar": 2, "of": 2}
    return {
        "hardware": "this machine",
        "model": "tiny",
        "fitted": ["engines.herald-exec.gemm_efficiency"],
        "points": [
            report_point("dense", 1024, 1, 100.0, 100.0, "fit"),
            report_point("dense", 4096, 1, 50.0, 55.0),
            report_point("herald", 4096, 1, 90.0, 88.0),
        ],
        "summary": {
            "fit": {"points": 1},
            "held-out": {"points": 2, **errors},
            "stages": {"denoise": errors, "select": {**errors, "median_error": -0.5, "share_of_busy_time": 0.03}},
        },
        "notes": ["a note <with> signs & all"],
    }
