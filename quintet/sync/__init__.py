"""Weights out of the engine and into a rollout."""
