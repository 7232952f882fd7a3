"""Checkpoint folders as people have them on disk: weights, tokenizer, chat template."""
