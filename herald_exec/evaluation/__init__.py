"""Accuracy with lm-eval: a registered model class, the papers' task settings pinned by version, and the command."""
