"""Rewards: verifiers that need only text, and the user's own functions.

A reward function takes (prompt, response, answer), all text, and the data set's row if it has a parameter of that name. It returns a
number, or a dict with "reward", "correct" where that can be told, and further numbers to log.
"""
