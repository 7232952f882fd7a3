"""The papers' exhibits, recomputed, with the published values beside ours."""
