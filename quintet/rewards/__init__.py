"""Rewards: verifiers that need only text, and the user's own functions.

A reward function takes (prompt, response, answer), all text, and returns a number, or a dict with "reward" and further
numbers to log.
"""
