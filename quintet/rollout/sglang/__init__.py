"""Generation by SGLang."""
