"""Folders of the four families with a byte-level tokenizer: everything that generation needs, in a few kilobytes."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from herald_exec.checkpoints.writing import write_checkpoint
from herald_exec.models import random_weights
from herald_pipeline import catalogue

SMALL = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 98,
    "mask_token_id": 97,
    "eos_token_ids": (96,),
    "block_length": 8,
    "max_positions": 512,
}
FAMILIES = {"sdar": "sdar-8b", "llada2": "llada2-mini", "llada": "llada-8b", "dream": "dream-7b-instruct"}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def small_shape(family):
    shape = catalogue.get(FAMILIES[family])
    sizes = SMALL | ({"num_kv_heads": 4} if family == "llada" else {})
    if shape.moe is not None:
        sizes["moe"] = replace(
            shape.moe,
            num_experts=16,
            experts_per_token=3,
            expert_intermediate_size=24,
            num_groups=4,
            groups_per_token=2,
        )
    return replace(shape, **sizes)


def write_tokenizer(folder, *, template=TEMPLATE, mask="<|mask|>"):
    """One id for each printable ASCII byte, space and newline, then end and mask tokens."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", mask])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def make_folder(tmp_path):
    """A family's folder; the head is sharpened so that some tokens pass the threshold."""

    def make(family="sdar", **tokenizer_options):
        shape = small_shape(family)
        weights = random_weights(shape, seed=5)
        weights.head.mul_(10)
        folder = write_checkpoint(tmp_path / family, shape, weights, shard_bytes=100_000)
        write_tokenizer(folder, **tokenizer_options)
        return folder

    return make


@pytest.fixture(params=sorted(FAMILIES))
def folder(request, make_folder):
    return make_folder(request.param)
