"""The checkpoint that ships: it loads, it is small, it answers, and other tools read it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from herald_exec.models import forward
from herald_exec.reference import SHIPPED, open_reference, read_shipped_material
from herald_exec.reference.decode import decode
from herald_exec.reference.evaluate import cell
from herald_exec.reference.scoring import score_sample
from herald_exec.reference.tasks import draw_samples
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import Attention

MIB = 2**20


@pytest.fixture(scope="module")
def model():
    return open_reference().load("cpu", torch.float32)


def test_the_shape_is_the_catalogues():
    assert open_reference().shape == catalogue.get("herald-ref")


def test_both_modes_together_fit_36_mib_in_shards_of_at_most_15():
    files = [path for path in SHIPPED.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 36 * MIB
    assert all(path.stat().st_size <= 15 * MIB for path in files)


def test_the_second_mode_is_the_same_network_with_full_attention():
    first, second = open_reference(), open_reference("herald-ref-bidirectional")
    assert second.shape.attention is Attention.BIDIRECTIONAL
    assert second.tensors == first.tensors


def test_an_unknown_mode_is_refused_with_the_closest():
    with pytest.raises(ConfigError, match="herald-ref"):
        open_reference("herald-reff")


def test_transformers_loads_it_and_gives_the_same_logits(model):
    theirs = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(3, 4096, (1, 96), generator=torch.Generator().manual_seed(0))
    blocks = torch.arange(96) // 32
    mask = torch.where(blocks[None, :] <= blocks[:, None], 0.0, float("-inf"))[None, None]
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask).logits[0]
        found = model.logits(forward(model, tokens).hidden[0])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_tokenizer_is_read_by_transformers_alike():
    theirs, ours = AutoTokenizer.from_pretrained(SHIPPED), read_shipped_material().encoder
    text = " The code of amber falcon is 48213.\nQuestion: What is it?"
    assert theirs(text).input_ids == ours(text)


def test_it_recites_passages_that_it_has_never_seen(model):
    material = read_shipped_material()
    samples = list(draw_samples(material, "rec", 512, 4, first_seed=1000))
    decoded = decode(model, samples)
    scores = [
        score_sample(sample, material.encoder.decode(answer))
        for sample, answer in zip(samples, decoded.answers, strict=True)
    ]
    assert sum(score.partial for score in scores) / 4 > 0.9


def test_without_the_haystack_it_knows_no_value(model):
    """Values are random, so what it answers right it has read: the prompt's middle replaced, the score goes."""
    material = read_shipped_material()
    samples = list(draw_samples(material, "kv", 512, 6, first_seed=2000))
    blind = []
    for sample in samples:
        asked = 64
        filler = tuple(int(token) for token in material.filler.tokens[: 512 - asked])
        blind.append((sample, filler + sample.prompt[-asked:]))
    prompts = [type(sample)(sample.task, 512, 0, prompt, sample.answer, sample.fields) for sample, prompt in blind]
    read, unread = decode(model, samples), decode(model, prompts)

    def right(decoded):
        texts = [material.encoder.decode(answer) for answer in decoded.answers]
        return sum(score_sample(sample, text).exact for sample, text in zip(samples, texts, strict=True))

    assert right(read) >= 4
    assert right(unread) <= 1


def test_the_model_card_and_the_notice_name_every_source():
    from herald_exec.reference.corpus import SOURCES, WORDS

    notice = (Path(__file__).parents[3] / "NOTICE").read_text(encoding="utf-8")
    assert all(source.package in notice for source in (*SOURCES, WORDS))


def test_the_shipped_evaluation_is_of_every_task_at_four_contexts():
    cells = json.loads((SHIPPED / "evaluation.json").read_text(encoding="utf-8"))
    assert len({(cell["task"], cell["context"]) for cell in cells}) == 28
    assert all(cell["exact"]["low"] <= cell["exact"]["value"] <= cell["exact"]["high"] for cell in cells)


def test_a_cell_counts_blocks_and_steps(model):
    found = cell(model, read_shipped_material(), "rec", 512, 2, first_seed=1000)
    assert found["samples"] == 2
    assert 1 <= found["steps_per_block"] <= 32
    assert 1 <= found["blocks_per_answer"] <= 3
