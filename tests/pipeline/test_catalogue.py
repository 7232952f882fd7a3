"""The catalogue against byte totals that were read elsewhere, and configs of every family."""

import json

import pytest

from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import Attention, KVDtype

# Read in the released weight indexes (bf16, two bytes a parameter).
INDEX_BYTES = {
    "sdar-8b": 16_381_470_720,
    "sdar-4b": 8_822_848_512,
    "llada-8b": 16_031_162_368,
    "dream-7b-instruct": 15_231_233_024,
}


@pytest.mark.parametrize(("name", "total"), INDEX_BYTES.items())
def test_weight_bytes_equal_the_released_index(name, total):
    assert catalogue.get(name).weight_bytes() == total


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llada2-mini", 16_255_643_392),
        ("llada2-flash", 102_889_705_216),
        ("herald-ref", 16_819_328),
    ],
)
def test_parameter_totals_equal_an_independent_count(name, params):
    assert catalogue.get(name).num_params == params


def test_a_token_passes_the_active_parameters_of_the_model_card():
    assert catalogue.get("llada2-mini").active_params == pytest.approx(1.11e9, rel=0.01)
    assert catalogue.get("llada2-flash").active_params == pytest.approx(5.5e9, rel=0.02)
    # 36 layers of attention (41.9 M) and FFN (151 M), and the head (622 M).
    assert catalogue.get("sdar-8b").active_params == pytest.approx(7.57e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llada2-mini", 40_960),
        ("sdar-8b", 147_456),
        ("llada-8b", 524_288),
        ("dream-7b-base", 57_344),
    ],
)
def test_kv_bytes_per_token_of_bf16(name, kv_bytes):
    assert catalogue.get(name).kv_bytes_per_token(KVDtype.BF16) == kv_bytes


def test_both_models_of_the_paper_share_groups_of_four():
    assert {catalogue.get(name).group_size for name in ("llada2-mini", "sdar-8b")} == {4}


def test_every_model_says_where_its_shape_was_read():
    assert all(catalogue.get(name).sources.get("shape") for name in catalogue.names())


def test_facts_that_were_not_seen_are_marked():
    assert catalogue.is_unconfirmed(catalogue.get("llada-1.5").sources["shape"])
    assert not catalogue.is_unconfirmed(catalogue.get("sdar-8b").sources["shape"])


def test_an_unknown_model_gets_the_closest_name():
    with pytest.raises(ConfigError, match="did you mean 'llada2-mini'"):
        catalogue.resolve("llada2-mni")


LLADA2 = {
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 4,
    "vocab_size": 157184,
    "eos_token_id": 156892,
}
LLADA = {
    "model_type": "llada",
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "embedding_size": 126464,
    "vocab_size": 126464,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_sequence_length": 4096,
    "mask_token_id": 126336,
    "eos_token_id": [126081, 126348],
    "weight_tying": False,
    "include_qkv_bias": False,
    "alibi": False,
}
DREAM = {
    "model_type": "Dream",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "mask_token_id": 151666,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "eos_token_id": 151643,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
SDAR = {
    "model_type": "sdar",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "block_size": 32,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "eos_token_id": [151643, 151645],
}


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLADA2, "llada2-mini"), (LLADA, "llada-8b"), (DREAM, "dream-7b-instruct"), (SDAR, "sdar-8b")],
)
def test_a_config_gives_the_shape_of_the_catalogue(config, name):
    read = catalogue.from_config(config, name=name)
    known = catalogue.get(name)
    for field in ("num_params", "moe", "attention", "mask_token_id", "eos_token_ids", "rope_theta"):
        assert getattr(read, field) == getattr(known, field), field
    for field in ("qk_norm", "qkv_bias", "shifted_logits", "max_positions", "block_length"):
        assert getattr(read, field) == getattr(known, field), field
    assert read.norm_eps == pytest.approx(known.norm_eps)
    assert read.rotary_fraction == known.rotary_fraction


@pytest.mark.parametrize("module", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral"])
def test_stock_families_have_as_many_parameters_as_transformers_builds(module, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    size = {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "sliding_window": None,
    }
    if "Moe" in module:
        size |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if module == "Mixtral":
        size |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{module}Config")(**size)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{module}ForCausalLM")(config)
    shape = catalogue.resolve(tmp_path)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.attention is Attention.BLOCK_CAUSAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_layers must be >= 1, got 0"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be >= 1, got 0"),
        (
            {"num_attention_heads": 10, "num_key_value_heads": 4},
            "10 query heads are not a multiple of 4",
        ),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden_size must be a number, got 'wide'"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "qwen33"}, "did you mean 'qwen3'"),
        ({"model_type": None}, "model_type None is not supported"),
    ],
)
def test_a_config_that_cannot_be_priced_is_refused_with_its_key(change, message):
    with pytest.raises(ConfigError, match=message):
        catalogue.from_config(SDAR | change)


def test_a_mixture_without_experts_per_token_is_refused():
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing"):
        catalogue.from_config({k: v for k, v in LLADA2.items() if k != "num_experts_per_tok"})


def test_a_path_names_the_file_or_the_folder(tmp_path):
    folder = tmp_path / "my-sdar"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SDAR))
    assert catalogue.resolve(folder).name == "my-sdar"
    assert catalogue.resolve(folder / "config.json") == catalogue.resolve(str(folder))


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the path does not exist"):
        catalogue.resolve(tmp_path / "none" / "config.json")
    with pytest.raises(ConfigError, match="pass the model's folder"):
        catalogue.resolve(tmp_path)
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        catalogue.resolve(broken)


def test_a_missing_mask_id_is_marked_unconfirmed():
    llama = SDAR | {"model_type": "llama"}
    shape = catalogue.from_config(llama)
    assert shape.mask_token_id == 0
    assert catalogue.is_unconfirmed(shape.sources["mask_token_id"])


def test_shapes_compare_by_their_numbers_and_can_be_dictionary_keys():
    assert {catalogue.get("tiny"): 1}[catalogue.resolve("tiny")] == 1
