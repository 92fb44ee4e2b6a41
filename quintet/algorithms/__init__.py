"""Advantages, policy losses, KL: pure tensor functions over packed tokens, no I/O and no process groups.

Everything takes flat tensors [tokens] and, where samples matter, `sample_ids` [tokens]. Sums over micro-batches and
ranks give the mini-batch's value, because every divisor is a global count that is passed in.
"""
