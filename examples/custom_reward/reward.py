"""A reward of your own: one function of three texts.

It is right answers that count, and among them the brief ones a little more.
"""


def reward(prompt: str, response: str, answer: str) -> dict[str, float | bool]:
    """Score one response. "reward" is trained on, "correct" is counted as accuracy, other numbers are logged beside them."""
    words = response.split()
    correct = bool(words) and words[0] == answer.strip()
    brevity = 1 / (1 + len(words) / 50)
    return {"reward": correct * (0.9 + 0.1 * brevity), "correct": correct, "words": float(len(words))}
