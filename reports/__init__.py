"""Charts, the papers' exhibits with ours beside, and one self-contained page."""
