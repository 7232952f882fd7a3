"""A small checkpoint with a tokenizer, and small local task files."""

import json
import os
from dataclasses import replace

import pytest

# Before the data set library is imported: the tasks of these tests lie on disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.checkpoints.tokenizer import load_tokenizer
from herald_exec.checkpoints.writing import write_checkpoint
from herald_exec.generate import decode_settings, generate
from herald_exec.models import random_weights
from herald_pipeline import catalogue

SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 98,
    "mask_token_id": 97,
    "eos_token_ids": (96,),
    "block_length": 8,
    "max_positions": 512,
}


@pytest.fixture
def folder(request, tmp_path):
    name = getattr(request, "param", "llada-8b")
    shape = replace(catalogue.get(name), **SMALL)
    weights = random_weights(shape, seed=5)
    weights.head.mul_(10)
    made = write_checkpoint(tmp_path / name, shape, weights)
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]
    tokenizer = Tokenizer(BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mask|>"])
    tokenizer.save(str(made / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return made


@pytest.fixture
def answer(folder):
    """What the checkpoint answers to a prompt, without the harness."""
    checkpoint = open_checkpoint(folder)
    tokenizer, model = load_tokenizer(folder), checkpoint.load()
    settings = decode_settings(
        checkpoint.shape,
        max_tokens=16,
        block=None,
        decoder="confidence",
        threshold=0.9,
        scheduler="fixed",
        cache="none",
        steps=32,
    )

    def ask(prompt, *, stop=(), special=True):
        ids = tokenizer.encode(prompt, add_special_tokens=special)
        return generate(model, tokenizer, [ids], settings, stop=stop)[0].text

    return ask


@pytest.fixture
def write_task(tmp_path):
    """Write a task file and its documents; returns the folder of tasks."""

    def write(documents, name="mine", extra=""):
        tasks = tmp_path / "tasks"
        tasks.mkdir(exist_ok=True)
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (tasks / f"{name}.yaml").write_text(
            f"""
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
    train: {data}
  cache_dir: {tmp_path / "cache"}
output_type: generate_until
test_split: test
fewshot_split: train
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  until: ["~~"]
  do_sample: false
metadata:
  version: 2.5
{extra}
"""
        )
        return tasks

    return write
