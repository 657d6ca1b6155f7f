"""Agreement of the trainer ranks of one engine: every call happens on all ranks, or fails on all ranks."""
