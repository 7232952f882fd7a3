"""A model's shape from any Hugging Face ``config.json`` of a dense GQA or mixture-of-experts transformer.

The families differ in key names only; one table of spellings covers them. What would be priced or stored wrongly
(latent attention, sliding windows, recurrent layers, layer norms we do not count) is refused with its key.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herald_pipeline.errors import ConfigError, check_number, did_you_mean, raise_problems, read_failure
from herald_pipeline.model import Attention, ModelShape, MoeShape

CONFIG_FILE = "config.json"
UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True)
class _Family:
    """What a family's config leaves unsaid because its model class fixes it."""

    attention: Attention = Attention.BLOCK_CAUSAL
    qkv_bias: bool = False
    qk_norm: bool = False
    shifted_logits: bool = False
    gate: str = "softmax"
    mask_token_id: int | None = None


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True),
    "sdar": _Family(qk_norm=True, mask_token_id=151669),
    "sdar_moe": _Family(qk_norm=True, mask_token_id=151669),
    "llada": _Family(Attention.BIDIRECTIONAL, mask_token_id=126336),
    "llada2_moe": _Family(qk_norm=True, gate="sigmoid", mask_token_id=156895),
    "llada2_moe_veomni": _Family(qk_norm=True, gate="sigmoid", mask_token_id=156895),
    "dream": _Family(Attention.BIDIRECTIONAL, qkv_bias=True, shifted_logits=True, mask_token_id=151666),
    "glm4_moe": _Family(gate="sigmoid"),
}

# Our field: the spellings that configs use, first match wins.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layers", "n_layer"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "num_heads": ("num_attention_heads", "n_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "mlp_hidden_size"),
    # LLaDA's embedding is padded: the table's size counts.
    "vocab_size": ("embedding_size", "vocab_size"),
    "max_positions": ("max_position_embeddings", "max_sequence_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    "rope_theta": ("rope_theta",),
    "rotary_fraction": ("partial_rotary_factor",),
    "tied_embeddings": ("tie_word_embeddings", "weight_tying"),
    "block_length": ("block_length", "block_size", "bd_size"),
    "mask_token_id": ("mask_token_id",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_intermediate_size": ("moe_intermediate_size",),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "num_groups": ("n_group",),
    "groups_per_token": ("topk_group",),
    "first_dense_layers": ("first_k_dense_replace",),
    "routed_scaling": ("routed_scaling_factor",),
    "normalise_weights": ("norm_topk_prob",),
}

_REQUIRED = ("num_layers", "hidden_size", "num_heads", "vocab_size")

# Keys whose mere presence (with a true value) changes the KV bytes or the cost in a way the shape does not say.
_UNSUPPORTED = {
    "kv_lora_rank": "latent attention (MLA) stores no K and V per head",
    "sliding_window": "sliding-window layers keep only part of the KV",
    "mlp_only_layers": "dense layers between expert layers",
    "linear_num_key_heads": "linear-attention layers keep no KV",
    "alibi": "ALiBi positions",
}


def _read(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config as a dict, and the text that names it in messages."""
    if isinstance(source, Mapping):
        return dict(source), "config"
    path = Path(source)
    if path.is_dir():
        path = path / CONFIG_FILE
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        message = f"no {CONFIG_FILE} at {path}; pass the model's folder or the file itself"
        raise ConfigError(message) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        message = f"{path} is not readable as JSON: {read_failure(error)}; pass a Hugging Face {CONFIG_FILE}"
        raise ConfigError(message) from None
    if not isinstance(loaded, dict):
        message = f"{path} must hold a JSON object, got {type(loaded).__name__}"
        raise ConfigError(message)
    return loaded, str(path)


def _value(config: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """The value under the first spelling present and not null, else ``default`` (a zero stays a zero)."""
    for key in _SPELLINGS[name]:
        if config.get(key) is not None:
            return config[key]
    return default


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings, whether at top level or in ``rope_parameters`` (transformers 5)."""
    nested = config.get("rope_parameters")
    nested = nested if isinstance(nested, Mapping) else {}
    theta = _value(config, "rope_theta", nested.get("rope_theta", 10000.0))
    fraction = _value(config, "rotary_fraction", nested.get("partial_rotary_factor", 1.0))
    return {"rope_theta": theta, "rotary_fraction": fraction}


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    problems = []
    for key, why in _UNSUPPORTED.items():
        if not config.get(key):
            continue
        if key == "sliding_window" and config.get("use_sliding_window") is False:
            continue
        problems.append(f"{where}: {key} = {config[key]!r}: {why}; such a model is not supported")
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if kinds:
        listed = ", ".join(sorted(map(str, kinds)))
        problems.append(f"{where}: layer_types has {listed}; only full_attention layers are supported")
    raise_problems(problems)


def _check(fields: Mapping[str, Any], where: str) -> None:
    """Every size is a positive whole number and the head counts divide."""
    whole = {
        key: value
        for key, value in fields.items()
        if key not in ("rope_theta", "rotary_fraction", "norm_eps", "routed_scaling")
    }
    zero_is_fine = ("mask_token_id", "num_shared_experts", "first_dense_layers")
    problems = [
        check_number(value, f"{where}: {key}", minimum=0 if key in zero_is_fine else 1, integer=True)
        for key, value in whole.items()
    ]
    problems += [
        check_number(fields[key], f"{where}: {key}", above=0)
        for key in ("rope_theta", "rotary_fraction", "norm_eps", "routed_scaling")
        if key in fields
    ]
    raise_problems(problems)
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if heads % kv_heads:
        message = (
            f"{where}: {heads} query heads are not a multiple of {kv_heads} KV heads; "
            "every KV head must serve the same number"
        )
        raise ConfigError(message)


def _moe(config: Mapping[str, Any], family: _Family, dense: int, where: str) -> MoeShape | None:
    experts = _value(config, "num_experts")
    if experts is None or experts == 0:
        return None
    width = _value(config, "expert_intermediate_size", dense)
    shared = _value(config, "num_shared_experts", 0)
    # Qwen2-MoE states its one shared expert by width.
    shared_width = config.get("shared_expert_intermediate_size")
    if shared_width:
        if shared_width % width:
            message = (
                f"{where}: shared_expert_intermediate_size {shared_width} is no multiple of the expert width {width}; "
                "such a model is not supported"
            )
            raise ConfigError(message)
        shared = shared_width // width
    fields = {
        "num_experts": experts,
        "experts_per_token": _value(config, "experts_per_token"),
        "expert_intermediate_size": width,
        "num_shared_experts": shared,
        "num_groups": _value(config, "num_groups", 1),
        "groups_per_token": _value(config, "groups_per_token", 1),
        "first_dense_layers": _value(config, "first_dense_layers", 0),
        "routed_scaling": _value(config, "routed_scaling", 1.0),
    }
    if fields["experts_per_token"] is None:
        message = f"{where}: num_experts_per_tok is missing; a mixture of experts needs it"
        raise ConfigError(message)
    _check(fields | {"num_heads": 1, "num_kv_heads": 1}, where)
    if fields["experts_per_token"] > experts:
        message = f"{where}: num_experts_per_tok {fields['experts_per_token']} exceeds num_experts {experts}"
        raise ConfigError(message)
    gate = config.get("score_function") or config.get("scoring_func") or family.gate
    normalise = _value(config, "normalise_weights")
    return MoeShape(gate=gate, normalise_weights=normalise is not False, **fields)


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def from_config(source: str | Path | Mapping[str, Any], name: str | None = None) -> ModelShape:
    """Shape of the model that a Hugging Face ``config.json`` describes.

    Parameters
    ----------
    source : str, Path or mapping
        The file, the folder that holds it, or its content.
    name : str, optional
        What to call it; the folder's name by default.

    Raises
    ------
    ConfigError
        The family is not known, a size is missing or impossible, or the model stores its KV in another way.
    """
    config, where = _read(source)
    kind = str(config.get("model_type", "")).lower()
    if kind not in _FAMILIES:
        message = f"{where}: model_type {config.get('model_type')!r} is not supported{did_you_mean(kind, _FAMILIES)}"
        raise ConfigError(message)
    family = _FAMILIES[kind]
    _refuse_unsupported(config, where)
    raise_problems(
        f"{where}: {_SPELLINGS[field][0]} is missing; a shape cannot be derived without it"
        for field in _REQUIRED
        if _value(config, field) is None
    )
    sources = {"*": where}
    fields = {field: _value(config, field) for field in _REQUIRED}
    fields["num_kv_heads"] = _value(config, "num_kv_heads", fields["num_heads"])
    # Defaults below divide by these, so they come first.
    raise_problems(
        check_number(fields[key], f"{where}: {key}", minimum=1, integer=True) for key in ("hidden_size", "num_heads")
    )
    fields["head_dim"] = _value(config, "head_dim", fields["hidden_size"] // fields["num_heads"])
    fields["intermediate_size"] = _value(config, "intermediate_size", 4 * fields["hidden_size"])
    fields["max_positions"] = _value(config, "max_positions", 32768)
    fields["block_length"] = _value(config, "block_length", 32)
    fields["norm_eps"] = _value(config, "norm_eps", 1e-6)
    mask = _value(config, "mask_token_id")
    if mask is None:
        mask = family.mask_token_id
        sources["mask_token_id"] = f"{UNCONFIRMED}: not in the config; the family's usual id"
    if mask is None:
        mask = 0
        sources["mask_token_id"] = f"{UNCONFIRMED}: not in the config; 0, for speed questions only"
    fields["mask_token_id"] = mask
    fields |= _rope(config)
    _check(fields, where)
    bias = config.get("attention_bias", config.get("include_qkv_bias", config.get("use_qkv_bias")))
    label = name or (Path(where).parent.name if where != "config" else kind) or kind
    return ModelShape(
        name=label,
        architecture=(config.get("architectures") or [kind])[0],
        attention=family.attention,
        moe=_moe(config, family, fields["intermediate_size"], where),
        qkv_bias=family.qkv_bias if bias is None else bool(bias),
        qk_norm=bool(config.get("use_qk_norm", family.qk_norm)),
        tied_embeddings=bool(_value(config, "tied_embeddings")),
        shifted_logits=family.shifted_logits,
        eos_token_ids=_eos(config),
        sources=sources,
        **fields,
    )
