"""Whether the samples that were trained on are, token by token and number by number, those that were generated."""

from __future__ import annotations

from quintet.controller.replay import Replay, ReplaySample
from quintet.data.text_pieces import before_stop
from quintet.data.tokenizer import Tokenizer

NEAR = 1e-6
"""Most that a log-prob may change on its way, in fp32."""


def token_faults(replay: Replay, tokenizer: Tokenizer, *, special: bool) -> list[str]:
    """Return what is wrong, a sentence a sample. special: whether prompts get the tokenizer's special tokens around them."""
    return [
        f"Sample {number}: {fault}."
        for number, sample in enumerate(replay.samples)
        if (fault := _fault(sample, replay, tokenizer, special)) is not None
    ]


def _fault(sample: ReplaySample, replay: Replay, tokenizer: Tokenizer, special: bool) -> str | None:
    made, trained = sample.generated, sample.trained
    if (made.ids, made.prompt_tokens) != (trained.ids, trained.prompt_tokens):
        return _other_ids(sample, tokenizer)
    if len(made.logprobs) != len(trained.rollout_logprobs):
        return f"{len(made.logprobs)} log-probs were told and {len(trained.rollout_logprobs)} arrived"
    if not _near(made.logprobs, trained.rollout_logprobs):
        for by, where in ((1, "later"), (-1, "earlier")):
            if _near(_cut(made.logprobs, -by), _cut(trained.rollout_logprobs, by)):
                return f"the rollout's log-probs arrived one position {where} than their tokens"
        return "the log-probs that arrived at the trainer are not those that the rollout told"
    response = made.ids[made.prompt_tokens :]
    text = str(tokenizer.decode(response, skip_special_tokens=True))
    if before_stop(text, replay.sampling.stop) != sample.response:
        return "its tokens read otherwise than the text that was recorded: the tokenizer's files have changed"
    if _ids(tokenizer, sample.prompt, special) != made.ids[: made.prompt_tokens]:
        return "its prompt's text is now other tokens: the tokenizer's files have changed"
    return None


def _cut(numbers: list[float], by: int) -> list[float]:
    """Without the first `by`, or, where that is negative, without so many of the last."""
    return numbers[max(by, 0) : len(numbers) + min(by, 0)]


def _near(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) > 0 and all(
        abs(x - y) <= NEAR * max(1.0, abs(x)) for x, y in zip(a, b, strict=True)
    )


def _other_ids(sample: ReplaySample, tokenizer: Tokenizer) -> str:
    made, trained = sample.generated, sample.trained
    pairs = zip(made.ids, trained.ids, strict=False)
    shorter = min(len(made.ids), len(trained.ids))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

    def shown(ids: list[int]) -> str:
        return f"{ids[at]} ({tokenizer.decode([ids[at]])!r})" if at < len(ids) else "none"

    text = (
        f"token {at} was generated as {shown(made.ids)} and trained on as {shown(trained.ids)}"
        if at < shorter or len(made.ids) != len(trained.ids)
        else f"its prompt was {made.prompt_tokens} tokens, and {trained.prompt_tokens} when it was trained on"
    )
    response, again = trained.ids[trained.prompt_tokens :], _ids(tokenizer, sample.response, special=False)
    if response[: len(again)] == again and len(response) - len(again) <= 1:
        text += "; what was trained on is its text, tokenized again"
    return text


def _ids(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids
