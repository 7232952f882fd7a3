"""Accuracy: of selection rules on the reference model's tasks, and of any checkpoint with lm-eval.

``rules``, ``scoring``, ``study``, ``plan``, ``summary``: sixteen rules on many prompts at once, a table, a cost front.
``grid``: the same methods in the executor itself. ``recall``: selections against each step's oracle. ``harness``,
``harness_model``, ``suites``: lm-eval's tasks with the papers' settings, pinned by version.
"""
