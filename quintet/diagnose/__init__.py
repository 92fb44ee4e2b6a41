"""Tell what went wrong: where rollout and trainer differ, and whether a run can be resumed bit for bit."""
