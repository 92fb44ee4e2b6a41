"""Samples whose tokens or numbers changed between rollout and trainer are told, each with how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quintet.controller.messages import ReplayTokens, TrainedTokens
from quintet.controller.replay import Replay, ReplaySample
from quintet.diagnose.token_check import token_faults
from quintet.rollout.base import Sampling

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "q": 3, "<eos>": 4}
MADE = ReplayTokens([3, 0, 1, 4], 1, [-1.0, -2.0, -3.0])
"""Of the text "ab", sampled as two tokens; a tokenizer makes it one."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    rust = Tokenizer(models.BPE(VOCABULARY, [("a", "b")]))
    rust.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def faults(tokenizer: Any, trained: TrainedTokens, sampling: Sampling | None = None, **changed: Any) -> str:
    sample = replace(ReplaySample("q", "ab", "stop", MADE, trained), **changed)
    return " ".join(token_faults(Replay(2, 1, sampling or Sampling(), [sample]), tokenizer, special=False))


RIGHT = TrainedTokens([3, 0, 1, 4], 1, [-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0])


def test_the_same_tokens_are_no_fault(tokenizer):
    assert faults(tokenizer, RIGHT) == ""
    assert faults(tokenizer, replace(RIGHT, rollout_logprobs=[-1.0, -2.0000001, -3.0])) == ""
    stopped = faults(tokenizer, RIGHT, Sampling(stop=("b",)), response="a")
    assert stopped == ""


@pytest.mark.parametrize(
    ("trained", "says"),
    [
        (TrainedTokens([3, 2, 4], 1, [-1.0, -2.0], [-1.0, -2.0]), "token 1 was generated as 0 ('a') and trained on as 2 ('ab'); what was trained on is its text, tokenized again"),
        (replace(RIGHT, ids=[3, 1, 1, 4]), "token 1 was generated as 0 ('a') and trained on as 1 ('b')."),
        (replace(RIGHT, ids=[3, 0, 1]), "token 3 was generated as 4 ('<eos>') and trained on as none"),
        (replace(RIGHT, prompt_tokens=2), "its prompt was 1 tokens, and 2 when it was trained on"),
        (replace(RIGHT, rollout_logprobs=[-9.0, -1.0, -2.0]), "arrived one position later than their tokens"),
        (replace(RIGHT, rollout_logprobs=[-2.0, -3.0, -9.0]), "arrived one position earlier"),
        (replace(RIGHT, rollout_logprobs=[-1.0, -2.5, -3.0]), "are not those that the rollout told"),
        (replace(RIGHT, rollout_logprobs=[-1.0]), "3 log-probs were told and 1 arrived"),
    ],
)  # fmt: skip
def test_what_changed_on_the_way_is_named(tokenizer, trained, says):
    assert says in faults(tokenizer, trained)


def test_other_tokenizer_files_are_named(tokenizer):
    assert "read otherwise than the text" in faults(tokenizer, RIGHT, response="ba")
    assert "prompt's text is now other tokens" in faults(tokenizer, RIGHT, prompt="a")
