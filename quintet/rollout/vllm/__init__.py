"""Generation by vLLM."""
