"""Folders in each family's real naming: written, checked, loaded, equal."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from herald_exec.checkpoints.folder import open_checkpoint, read_shape
from herald_exec.checkpoints.naming import named_views
from herald_exec.checkpoints.shards import INDEX_FILE
from herald_exec.checkpoints.writing import plan_shards, write_checkpoint
from herald_exec.models import empty_weights, random_weights
from herald_pipeline import catalogue

# Names and sizes copied from the families' own model files and indexes (research notes, section 1.3).
REAL_NAMES = {
    "sdar-8b": {
        "model.embed_tokens.weight": (151936, 4096),
        "lm_head.weight": (151936, 4096),
        "model.layers.35.self_attn.q_proj.weight": (4096, 4096),
        "model.layers.0.self_attn.k_norm.weight": (128,),
        "model.layers.0.mlp.down_proj.weight": (4096, 12288),
    },
    "dream-7b-base": {
        "model.layers.27.self_attn.k_proj.bias": (512,),
        "model.layers.0.self_attn.v_proj.weight": (512, 3584),
    },
    "llada-8b": {
        "model.transformer.wte.weight": (126464, 4096),
        "model.transformer.ff_out.weight": (126464, 4096),
        "model.transformer.blocks.31.ff_out.weight": (4096, 12288),
        "model.transformer.blocks.0.ff_proj.weight": (12288, 4096),
        "model.transformer.blocks.0.attn_out.weight": (4096, 4096),
    },
    "llada2-mini": {
        "model.word_embeddings.weight": (157184, 2048),
        "model.layers.0.mlp.gate_proj.weight": (5120, 2048),
        "model.layers.1.attention.query_key_value.weight": (3072, 2048),
        "model.layers.19.mlp.experts.255.down_proj.weight": (2048, 512),
        "model.layers.1.mlp.gate.expert_bias": (256,),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (512, 2048),
    },
}
REAL_COUNTS = {"sdar-8b": 399, "dream-7b-base": 339, "llada-8b": 291, "llada2-mini": 14813}


@pytest.mark.parametrize("name", sorted(REAL_NAMES))
def test_names_counts_and_shapes_are_the_published_ones(name):
    shape = catalogue.get(name)
    views = named_views(shape, empty_weights(shape, "meta", torch.bfloat16))
    assert len(views) == REAL_COUNTS[name]
    assert {key: tuple(views[key].shape) for key in REAL_NAMES[name]} == REAL_NAMES[name]


def test_llada2_stores_the_router_in_fp32_and_little_else():
    shape = catalogue.get("llada2-mini")
    views = named_views(shape, empty_weights(shape, "meta", torch.bfloat16))
    wide = {name for name, view in views.items() if view.dtype is torch.float32}
    assert all(".mlp.gate." in name for name in wide)
    assert len(wide) == 2 * 19


def test_a_sharded_folder_loads_to_the_same_weights(make_folder, family):
    folder, shape, weights = make_folder(family)
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = open_checkpoint(folder).load()
    assert replace(model.shape, name=shape.name, sources=shape.sources) == shape
    for (name, ours), (_, theirs) in zip(model.weights.tensors(), weights.tensors(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_single_file_without_index_loads(make_folder, family):
    folder, _, weights = make_folder(family, shard_bytes=10**9)
    assert not (folder / INDEX_FILE).exists()
    model = open_checkpoint(folder).load()
    assert torch.equal(model.weights.head, weights.head)


def test_merged_experts_load_to_the_same_weights(make_folder):
    folder, _, weights = make_folder("llada2", merged_experts=True)
    index = json.loads((folder / INDEX_FILE).read_text())
    assert "model.layers.1.mlp.experts.up_proj" in index["weight_map"]
    model = open_checkpoint(folder).load()
    for (_, ours), (_, theirs) in zip(model.weights.tensors(), weights.tensors(), strict=True):
        assert torch.equal(ours, theirs)


def test_written_files_hold_each_tensor_once_and_to_the_byte(make_folder, family):
    folder, shape, _ = make_folder(family)
    index = json.loads((folder / INDEX_FILE).read_text())
    found = {}
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="np") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                assert index["weight_map"][name] == shard.name
                found[name] = file.get_tensor(name).nbytes
    assert sum(found.values()) == index["metadata"]["total_size"] == 4 * shape.num_params


def test_loading_converts_the_type_when_asked(make_folder, family):
    folder, _, weights = make_folder(family)
    model = open_checkpoint(folder).load(dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    assert torch.equal(model.weights.layers[0].qkv, weights.layers[0].qkv.bfloat16())


def test_tensors_that_no_forward_needs_are_passed_over(make_folder, tmp_path):
    shape = replace(catalogue.get("tiny"), tied_embeddings=True)
    folder = write_checkpoint(tmp_path / "tied", shape, random_weights(shape))
    from safetensors.torch import save_file

    extra = {"lm_head.weight": torch.zeros(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_file(extra, folder / "extra.safetensors")
    (folder / "model.safetensors").rename(folder / "main.safetensors")
    assert "lm_head.weight" not in open_checkpoint(folder).tensors


def test_end_tokens_of_both_config_files_count(make_folder):
    folder, _, _ = make_folder("sdar")
    (folder / "generation_config.json").write_text('{"eos_token_id": [94, 93]}')
    assert open_checkpoint(folder).shape.eos_token_ids == (94, 93)


@pytest.mark.parametrize(
    ("name", "config", "ends"),
    [
        ("llada-8b", {"d_model": 64, "n_heads": 4, "n_layers": 1, "mlp_hidden_size": 8}, (126081, 126348)),
        ("sdar-8b", {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}, (151643, 151645)),
    ],
)
def test_end_tokens_that_the_files_leave_out_come_from_the_catalogue(tmp_path, name, config, ends):
    shape = catalogue.get(name)
    kind = "llada" if name == "llada-8b" else "sdar"
    common = {"model_type": kind, "architectures": [shape.architecture], "vocab_size": shape.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(config | common | {"eos_token_id": ends[0]}))
    assert read_shape(tmp_path).eos_token_ids == ends


def test_shards_are_cut_before_they_exceed_the_limit():
    sizes = [("a", 4), ("b", 3), ("c", 9), ("d", 1), ("e", 1)]
    assert plan_shards(sizes, 7) == [["a", "b"], ["c"], ["d", "e"]]


PEAK = """
import resource, sys, torch
from herald_exec.checkpoints.folder import open_checkpoint, read_shape
checkpoint = open_checkpoint(sys.argv[1])
checkpoint.load("meta")
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = checkpoint.load("cpu")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024, model.weights.nbytes())
"""


def test_loading_holds_at_most_one_shard_beyond_the_model(tmp_path):
    """A process of its own; shards of 10 MB: the peak is the model and 1.1 shards, with 8 MB for the allocator."""
    shape = replace(catalogue.get("tiny"), num_layers=8, hidden_size=512, intermediate_size=1024, vocab_size=1024)
    folder = write_checkpoint(tmp_path / "big", shape, random_weights(shape), shard_bytes=10_000_000)
    out = subprocess.run([sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True).stdout
    peak, model = map(int, out.split())
    assert model > 50_000_000
    assert peak <= model + 11_000_000 + 8_000_000
