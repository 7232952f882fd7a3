"""The demonstration's model: seeded random weights, large enough that a step takes milliseconds on one core."""

from dataclasses import replace

from herald_pipeline import catalogue
from herald_pipeline.model import ModelShape

DEMO = "demo"


def demo_shape() -> ModelShape:
    """``tiny``, grown: 6 layers of 384, 6 query heads over 2 KV heads of 64, a vocabulary of 2048 (11 M parameters)."""
    return replace(
        catalogue.get("tiny"),
        name=DEMO,
        num_layers=6,
        hidden_size=384,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=1024,
        vocab_size=2048,
        max_positions=32768,
        mask_token_id=2047,
        eos_token_ids=(),
    )


def resolve(name: str) -> ModelShape:
    """Model of that name, of a config.json, or the demonstration's."""
    return demo_shape() if name == DEMO else catalogue.resolve(name)
