from dataclasses import replace

import pytest

from calibration.points import FIT, Point
from calibration.reconcile import Calibration
from calibration.reconcile import reconcile as reconcile_all
from calibration.runs import Sample
from herald_pipeline import catalogue, hardware_io


@pytest.fixture(scope="session")
def shape():
    return catalogue.get("demo")


@pytest.fixture(scope="session")
def profile():
    """A complete profile that ships; its numbers do not matter here, only that they are there."""
    return hardware_io.resolve("h100-sxm-80g_xeon-8481c")


def point(method="dense", context=1024, batch=1, **others):
    return Point(method, context, batch, kv_dtype="bf16", **others)


def sample(rate, *, stages=None, reference_s=None, shares=None, **others):
    figures = {} if rate is None else {"throughput_tok_s": rate, "block_time_s": 32 / rate}
    return Sample(point(**others), figures, stages or {}, reference_s, shares or {})


def training(rate, **others):
    made = sample(rate, **others)
    return replace(made, point=replace(made.point, set=FIT))


def predicting(rate, **stages):
    return lambda p: sample(rate, stages=stages, method=p.method, context=p.context, batch=p.batch)


def reconcile(runs, profile, shape, reference_s, predict):
    return reconcile_all(runs, shape, [Calibration(profile, predict, reference_s)])


def only(report):
    (found,) = report.points
    return found
