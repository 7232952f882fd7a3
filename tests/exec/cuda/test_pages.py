"""Completed blocks of all layers and rows, put into the pages of host memory at once."""

import pytest
import torch

from herald_exec.host import HostKV
from herald_exec.models import tiny
from herald_pipeline.errors import RunError


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]])
@pytest.mark.parametrize("starts", [[0, 0, 0], [64, 60, 0]])
def test_blocks_reach_their_pages_wherever_they_lie(rows, starts):
    shape = tiny().shape
    host = HostKV(2, 3, 130, shape, torch.float32)
    starts = starts[: len(rows)]
    before = torch.randn(2, 3, shape.num_kv_heads, 64, shape.head_dim)
    for layer in range(2):
        for row, start in zip(rows, starts, strict=True):
            if start:
                host.append(layer, row, 0, before[layer, row, :, :start], before[layer, row, :, :start])
    keys, values = torch.randn(2, 2, len(rows), shape.num_kv_heads, 8, shape.head_dim)
    host.append_blocks(rows, starts, keys, values)
    for layer in range(2):
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            k, v = host.read(layer, row, start + 8)
            assert torch.equal(k[:, start:], keys[layer, i])
            assert torch.equal(v[:, start:], values[layer, i])
            assert torch.equal(k[:, :start], before[layer, row, :, :start])
    host.close()


def test_a_block_that_leaves_a_gap_is_refused():
    shape = tiny().shape
    host = HostKV(1, 2, 64, shape, torch.float32)
    block = torch.zeros(1, 1, shape.num_kv_heads, 8, shape.head_dim)
    with pytest.raises(RunError, match="slot 1: 0 positions are stored, the next write begins at 8"):
        host.append_blocks([1], [8], block, block)
    host.close()
