"""Generation back ends behind one protocol: native, vLLM and SGLang by the same words."""
