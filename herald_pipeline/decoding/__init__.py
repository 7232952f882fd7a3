"""Decoding policies, pure: acceptance rule x block scheduler x cache rule, samplers and statistics.

All are functions on arrays of fixed shape, for numpy and torch alike. ``acceptance``, ``schedulers`` and ``caches`` are
registries by name (``--decoder``, ``--scheduler``, ``--cache``).
"""
