"""The models known by name: shapes, token ids and where each fact was read.

A fact marked *unconfirmed* in ``sources`` was not seen in the model's own files; ``herald-sim models`` prints the mark.
Parameter totals follow from the shapes, and equal the byte totals of the published weight indexes where one was seen.
"""

from collections.abc import Callable
from pathlib import Path

from herald_pipeline.errors import ConfigError, unknown_name
from herald_pipeline.hf_config import CONFIG_FILE, UNCONFIRMED, from_config
from herald_pipeline.model import Attention, ModelShape, MoeShape

__all__ = ["from_config", "get", "is_unconfirmed", "names", "resolve"]

_INDEX = "recomputed from these shapes, equals the weight index's total_size"

# The tokenizers' ids that more than one checkpoint shares.
_QWEN_EOS = (151643, 151645)
_SDAR_MASK = 151669
_LLADA_MASK, _LLADA_EOS = 126336, (126081, 126348)
_LLADA2_MASK, _LLADA2_EOS = 156895, (156892,)
_DREAM_MASK, _DREAM_EOS = 151666, (151643,)

_LLADA2_GATE = {
    "num_experts": 256,
    "experts_per_token": 8,
    "num_shared_experts": 1,
    "num_groups": 8,
    "groups_per_token": 4,
    "first_dense_layers": 1,
    "routed_scaling": 2.5,
    "gate": "sigmoid",
}


def _llada2(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    intermediate: int,
    expert_intermediate: int,
    sources: dict[str, str],
) -> ModelShape:
    return ModelShape(
        name=name,
        architecture="LLaDA2MoeModelLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=157184,
        moe=MoeShape(expert_intermediate_size=expert_intermediate, **_LLADA2_GATE),  # type: ignore[arg-type]
        qk_norm=True,
        rope_theta=6e5,
        rotary_fraction=0.5,
        mask_token_id=_LLADA2_MASK,
        eos_token_ids=_LLADA2_EOS,
        sources=sources,
    )


def _llada2_mini() -> ModelShape:
    return _llada2(
        "llada2-mini",
        layers=20,
        hidden=2048,
        heads=16,
        intermediate=5120,
        expert_intermediate=512,
        sources={
            "shape": "inclusionAI/dFactory configs/model_configs/llada2_mini/config.json",
            "num_params": f"{UNCONFIRMED}: 16,255,643,392 computed from the shape; no weight index was seen",
            "moe": "dFactory models/llada2_moe, LLaDA2MoeGate",
            "token ids": "dFactory models/llada2_moe and sglang's LLaDA2 configuration",
            "max_positions": "a loader test that carries the released config; the preview's config says 16384",
        },
    )


def _llada2_flash() -> ModelShape:
    return _llada2(
        "llada2-flash",
        layers=32,
        hidden=4096,
        heads=32,
        intermediate=9216,
        expert_intermediate=1024,
        sources={
            "shape": "inclusionAI/dFactory configs/model_configs/llada2_flash/config.json",
            "num_params": f"{UNCONFIRMED}: 102,889,705,216 computed from the shape; no weight index was seen",
            "moe": "dFactory models/llada2_moe, LLaDA2MoeGate",
            "token ids": "as llada2-mini",
            "max_positions": f"{UNCONFIRMED}: the value of the later 2.1-flash",
        },
    )


def _sdar(name: str, checkpoint: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    seen = (
        f"JetAstra/SDAR training/model/{checkpoint}/config.json"
        if name != "sdar-1.7b"
        else f"config.json of {checkpoint} as bundled in hxhcreate/DARE"
    )
    return ModelShape(
        name=name,
        architecture="SDARForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=ffn,
        vocab_size=151936,
        qk_norm=True,
        mask_token_id=_SDAR_MASK,
        eos_token_ids=_QWEN_EOS,
        sources={
            "shape": seen,
            "num_params": f"{UNCONFIRMED}: computed" if name == "sdar-1.7b" else _INDEX,
            "token ids": "config.json and generation_config.json",
            "block_length": "config.json says 4; the -b32 checkpoints (SDAR README, 2025-09-09) are served at 32",
        },
    )


def _sdar_8b() -> ModelShape:
    return _sdar("sdar-8b", "SDAR-8B-Chat", layers=36, hidden=4096, heads=32, ffn=12288)


def _sdar_4b() -> ModelShape:
    return _sdar("sdar-4b", "SDAR-4B-Chat", layers=36, hidden=2560, heads=32, ffn=9728)


def _sdar_1_7b() -> ModelShape:
    return _sdar("sdar-1.7b", "SDAR-1dot7B-Chat", layers=28, hidden=2048, heads=16, ffn=6144)


def _llada(name: str, sources: dict[str, str]) -> ModelShape:
    return ModelShape(
        name=name,
        architecture="LLaDAModelLM",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=126464,
        attention=Attention.BIDIRECTIONAL,
        rope_theta=5e5,
        norm_eps=1e-5,
        mask_token_id=_LLADA_MASK,
        eos_token_ids=_LLADA_EOS,
        max_positions=4096,
        sources=sources | {"block_length": "no property of the model: 32 is the usual sampling choice"},
    )


def _llada_8b() -> ModelShape:
    shape = "config.json of LLaDA-8B-Instruct as bundled in hxhcreate/DARE"
    return _llada("llada-8b", {"shape": shape, "num_params": _INDEX, "token ids": "config.json"})


def _llada_1_5() -> ModelShape:
    fact = f"{UNCONFIRMED}: same class and loader as llada-8b in three repositories; its config.json was not seen"
    return _llada("llada-1.5", {"shape": fact, "num_params": fact, "token ids": fact})


def _dream(name: str, sources: dict[str, str]) -> ModelShape:
    return ModelShape(
        name=name,
        architecture="DreamModel",
        num_layers=28,
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
        attention=Attention.BIDIRECTIONAL,
        qkv_bias=True,
        shifted_logits=True,
        mask_token_id=_DREAM_MASK,
        eos_token_ids=_DREAM_EOS,
        max_positions=131072,
        sources=sources
        | {
            "max_positions": f"config.json; {UNCONFIRMED} as a training length, which is shorter",
            "block_length": "no property of the model: 32 is the usual sampling choice",
        },
    )


def _dream_instruct() -> ModelShape:
    shape = "config.json of Dream-v0-Instruct-7B as bundled in hxhcreate/DARE"
    return _dream("dream-7b-instruct", {"shape": shape, "num_params": _INDEX, "token ids": "config.json"})


def _dream_base() -> ModelShape:
    fact = f"{UNCONFIRMED}: taken to be the shape of dream-7b-instruct; its own config.json was not seen"
    return _dream("dream-7b-base", {"shape": fact, "num_params": fact, "token ids": fact})


def _tiny() -> ModelShape:
    return ModelShape(
        name="tiny",
        architecture="Qwen3ForCausalLM",
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        qk_norm=True,
        rope_theta=1e4,
        mask_token_id=1,
        eos_token_ids=(0,),
        sources={"shape": "ours: seeded random weights, for tests"},
    )


def _demo() -> ModelShape:
    return ModelShape(
        name="demo",
        architecture="Qwen3ForCausalLM",
        num_layers=4,
        hidden_size=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=2048,
        qk_norm=True,
        rope_theta=1e4,
        mask_token_id=2047,
        sources={"shape": "ours: seeded random weights, large enough that a step takes milliseconds on one core"},
    )


def _herald_ref() -> ModelShape:
    return ModelShape(
        name="herald-ref",
        architecture="Qwen3ForCausalLM",
        num_layers=10,
        hidden_size=384,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=896,
        vocab_size=4096,
        qk_norm=True,
        rope_theta=2e5,
        tied_embeddings=True,
        mask_token_id=1,
        eos_token_ids=(0,),
        max_positions=8192,
        sources={
            "shape": "ours: the trained reference model",
            "max_positions": "the longest training length",
        },
    )


_MAKERS: dict[str, Callable[[], ModelShape]] = {
    "llada2-mini": _llada2_mini,
    "llada2-flash": _llada2_flash,
    "sdar-8b": _sdar_8b,
    "sdar-4b": _sdar_4b,
    "sdar-1.7b": _sdar_1_7b,
    "llada-8b": _llada_8b,
    "llada-1.5": _llada_1_5,
    "dream-7b-base": _dream_base,
    "dream-7b-instruct": _dream_instruct,
    "tiny": _tiny,
    "demo": _demo,
    "herald-ref": _herald_ref,
}


def names() -> tuple[str, ...]:
    """Names of all models in the catalogue."""
    return tuple(_MAKERS)


def get(name: str) -> ModelShape:
    """The shape of the model with this name; :class:`ConfigError` with the closest name otherwise."""
    if name not in _MAKERS:
        raise unknown_name(kind="model", name=name, valid=_MAKERS)
    return _MAKERS[name]()


def resolve(name_or_path: str | Path) -> ModelShape:
    """The model with this name, or the one that a ``config.json`` (or a folder that holds one) describes."""
    text = str(name_or_path)
    if text in _MAKERS:
        return _MAKERS[text]()
    path = Path(text)
    if path.exists():
        return from_config(path)
    if "/" in text or text.endswith(".json"):
        listed = ", ".join(_MAKERS)
        message = f"no model {text!r}: the path does not exist; pass a folder with {CONFIG_FILE}, or one of {listed}"
        raise ConfigError(message)
    raise unknown_name(kind="model", name=text, valid=_MAKERS)


def is_unconfirmed(source: str) -> bool:
    """Whether a fact's source says that the fact was not seen in the model's own files."""
    return UNCONFIRMED in source
