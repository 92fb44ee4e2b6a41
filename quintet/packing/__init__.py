"""Planning in plain Python: which samples go into which micro-batch, and how they are aligned."""
