"""Prompts that are prefilled once for all rules."""

import torch

from herald_exec.evaluation import prompts as module
from herald_exec.evaluation.prompts import Prompts
from herald_exec.models import random_model, tiny_shape
from herald_exec.models.forward import prefill
from herald_exec.proxies import skew
from herald_exec.reference import read_shipped_material
from herald_exec.reference.tasks import draw_samples
from herald_pipeline.settings import Settings


def test_infinigens_columns_are_those_of_each_prompt_read_alone(monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 2)
    monkeypatch.setattr(module, "_CHUNK", 96)
    model = random_model(tiny_shape(vocab_size=4096, num_layers=3), seed=3)
    samples = list(draw_samples(read_shipped_material(), "kv", 256, 3, first_seed=70))
    found = Prompts(model, samples).columns
    for row, sample in enumerate(samples):
        alone = []

        def hook(_layer, q, _k, _v, alone=alone):
            alone.append(skew(q[0], model.shape.num_kv_heads, Settings().proxy_fraction))

        prefill(model, torch.tensor(sample.prompt), hook)
        for mine, wanted in zip(found, alone, strict=True):
            # A column has no sign: what all of them span counts.
            torch.testing.assert_close(mine[row] @ mine[row].mT, wanted @ wanted.mT, atol=1e-3, rtol=0)
