import pytest

pytest.importorskip("herald_exec.kernels._core", reason="the kernel extension is not built")

from herald_exec import kernels


@pytest.fixture(params=kernels.usable_tiers())
def tier(request):
    before = kernels.active_tier()
    kernels.set_tier(request.param)
    yield request.param
    kernels.set_tier(before)
