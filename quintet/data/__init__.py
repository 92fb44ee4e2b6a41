"""Prompt datasets, built-in tasks, tokenizers, and the Batch type."""
