"""A folder that cannot be used says why, once, with everything that is wrong."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.checkpoints.shards import INDEX_FILE
from herald_pipeline.errors import ConfigError


def message_of(folder):
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(folder, change):
    """Rewrite the only shard after ``change`` of its tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_folder(tmp_path):
    assert message_of(tmp_path / "nowhere").endswith(
        "pass the folder that holds config.json and the .safetensors files"
    )


def test_empty_folder(tmp_path):
    assert f"{tmp_path} is empty" in message_of(tmp_path)


def test_folder_without_config(make_folder):
    folder, _, _ = make_folder("sdar")
    (folder / "config.json").unlink()
    assert "no config.json" in message_of(folder)


def test_missing_shards_are_all_named(make_folder, family):
    folder, _, _ = make_folder(family)
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards[:2]:
        shard.unlink()
    message = message_of(folder)
    assert message.count("is missing (") == 2
    assert all(shard.name in message for shard in shards[:2])


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_shard(make_folder, keep):
    folder, _, _ = make_folder("llada2")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    assert re.search(
        rf"{shard.name} is damaged or cut short \([\d,]+ bytes: .+\); download it again", message_of(folder)
    )


def test_index_that_is_no_json(make_folder):
    folder, _, _ = make_folder("dream")
    (folder / INDEX_FILE).write_text("<html>")
    assert "is not readable as JSON" in message_of(folder)


def test_index_without_a_weight_map(make_folder):
    folder, _, _ = make_folder("dream")
    (folder / INDEX_FILE).write_text("{}")
    assert "holds no weight_map" in message_of(folder)


def test_index_that_promises_more_than_a_shard_holds(make_folder):
    folder, _, _ = make_folder("dream")
    index = json.loads((folder / INDEX_FILE).read_text())
    first = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.extra.weight"] = first
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert f"{first} lacks 1 tensors that {INDEX_FILE} promises, first model.extra.weight" in message_of(folder)


def test_weights_in_another_format_say_so(make_folder):
    folder, _, _ = make_folder("sdar", shard_bytes=10**9)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "it has pytorch_model.bin: convert to safetensors first" in message_of(folder)


def test_config_with_too_many_layers_and_a_wrong_width_lists_everything(make_folder):
    folder, _, _ = make_folder("sdar")
    change_config(folder, num_hidden_layers=5, intermediate_size=64)
    message = message_of(folder)
    assert "missing tensor model.layers.*.input_layernorm.weight: 2 tensors, first model.layers.3." in message
    assert "mis-shaped tensor model.layers.*.mlp.down_proj.weight: 3 tensors" in message
    assert "[48, 80] stored, [48, 64] by config.json" in message


def test_missing_unexpected_and_misshaped_come_in_one_message(make_folder):
    folder, _, _ = make_folder("dream", shard_bytes=10**9)

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
        tensors["lm_head.weight"] = torch.ones(96, 47)

    change_tensors(folder, change)
    problems = message_of(folder).splitlines()[1:]
    assert problems == [
        "missing tensor model.norm.weight [48]",
        "unexpected tensor model.layers.0.self_attn.q_norm.weight",
        "mis-shaped tensor lm_head.weight: [96, 47] stored, [96, 48] by config.json",
    ]


def test_missing_experts_are_counted_not_listed_one_by_one(make_folder):
    folder, _, _ = make_folder("llada2")
    change_config(folder, num_experts=24)
    message = message_of(folder)
    assert "missing tensor model.layers.*.mlp.experts.*.up_proj.weight: 16 tensors" in message
    assert len(message.splitlines()) < 10


def test_quantised_weights_are_refused_with_their_type(make_folder):
    folder, _, _ = make_folder("sdar", shard_bytes=10**9)
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(96, 48, dtype=torch.int8)}))
    assert "unsupported type lm_head.weight: stored as I8, supported are F64, F32, BF16, F16" in message_of(folder)


def test_unknown_architecture_names_the_known_ones(make_folder):
    folder, _, _ = make_folder("sdar")
    change_config(folder, model_type="sdarr")
    assert "did you mean 'sdar'?" in message_of(folder)
