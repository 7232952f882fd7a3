"""What the doctor says about a folder, without loading it."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from herald_exec.checkpoints import doctor
from herald_exec.checkpoints.memory import MemoryNeed, available_bytes


def write_tokenizer(folder, specials):
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(94)}, unk_token="w0"))
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def test_a_sound_folder_has_only_good_findings(make_folder, family):
    folder, shape, _ = make_folder(family)
    write_tokenizer(folder, ["<|end|>", "<|mask|>"])
    findings = doctor.examine_checkpoint(folder)
    assert all(finding.ok for finding in findings), findings
    assert shape.architecture in by_topic(findings)["model"].text
    assert "mask 95, end 94" in by_topic(findings)["special tokens"].text
    assert "float32; all fit" in by_topic(findings)["tensors"].text


def test_a_damaged_folder_is_one_finding(make_folder):
    folder, _, _ = make_folder("sdar")
    next(iter(folder.glob("*.safetensors"))).unlink()
    (finding,) = doctor.examine_checkpoint(folder)
    assert not finding.ok
    assert "is missing" in finding.text


def test_a_missing_tokenizer_is_said_beside_the_rest(make_folder):
    folder, _, _ = make_folder("dream")
    findings = by_topic(doctor.examine_checkpoint(folder))
    assert findings["tensors"].ok
    assert not findings["tokenizer"].ok


@pytest.mark.parametrize("text", ["<|MASK|>", "<MASK>", "<|mdm_mask|>", "|<MASK>|", "<|mask|>"])
def test_a_mask_token_with_another_id_is_found(make_folder, text):
    folder, _, _ = make_folder("sdar")
    write_tokenizer(folder, [text, "<|end|>"])
    finding = by_topic(doctor.examine_checkpoint(folder))["special tokens"]
    assert not finding.ok
    assert f"mask token 95 by the config, the tokenizer has {text} = 94" in finding.text


def test_a_tokenizer_of_another_model_is_found(make_folder):
    folder, _, _ = make_folder("sdar")
    write_tokenizer(folder, [f"<{i}>" for i in range(10)])
    finding = by_topic(doctor.examine_checkpoint(folder))["special tokens"]
    assert "the tokenizer has 104 ids, the embedding 96" in finding.text


def test_no_end_token_is_said(make_folder):
    folder, _, _ = make_folder("sdar")
    write_tokenizer(folder, ["<|end|>", "<|mask|>"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert "answers end by length only" in by_topic(doctor.examine_checkpoint(folder))["special tokens"].text


def test_memory_says_what_is_needed_and_what_is_free():
    need = MemoryNeed(weight_bytes=32_500_000_000, largest_shard_bytes=4_000_000_000, available=24_000_000_000)
    assert "32.50 GB needed, 24.00 GB free" in need.problem(torch.device("cpu"))
    assert MemoryNeed(10, 10, 10).problem(torch.device("cpu")) is None
    assert MemoryNeed(10, 10, None).problem(torch.device("cpu")) is None


def test_host_memory_comes_from_the_control_group(tmp_path):
    cpu = torch.device("cpu")
    assert available_bytes(cpu, tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert available_bytes(cpu, tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(cpu, tmp_path) is None
