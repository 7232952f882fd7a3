"""For all tests: those marked ``cuda`` are deselected where torch finds no CUDA device."""

import importlib.util

import pytest


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    # torch is imported only where such a test was collected.
    if marked and not _has_cuda():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in set(marked)]
