"""Generation with the engine's own model definition: the embedded default."""
