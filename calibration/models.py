"""The demonstration's model: seeded random weights, large enough that a step takes milliseconds on one core."""

from dataclasses import replace

from herald_pipeline import catalogue
from herald_pipeline.model import ModelShape

DEMO = "demo"


def demo_shape() -> ModelShape:
    """``tiny``, grown to 28 M parameters: 4 layers of 768, 12 query heads over 4 KV heads of 64, 2048 words."""
    return replace(
        catalogue.get("tiny"),
        name=DEMO,
        num_layers=4,
        hidden_size=768,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        intermediate_size=2048,
        vocab_size=2048,
        max_positions=32768,
        mask_token_id=2047,
        eos_token_ids=(),
    )


def resolve(name: str) -> ModelShape:
    """Model of that name, of a config.json, or the demonstration's."""
    return demo_shape() if name == DEMO else catalogue.resolve(name)
