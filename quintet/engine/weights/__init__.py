"""Weights of a rank: the shard map, and what derives from it: Hugging Face in and out, resharding, fingerprints."""
