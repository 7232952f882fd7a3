"""Kernels run in Triton's interpreter where there is no GPU; without Triton they are skipped with that reason."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before any of them is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield
