"""Generation and evaluation without training."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quintet.data.prompts import Messages, make_prompts
from quintet.data.text_pieces import TextPieces
from quintet.data.tokenizer import decoder
from quintet.errors import writing
from quintet.recipe.schema import Recipe
from quintet.train.evaluate import evaluate as evaluate_session
from quintet.train.session import session


def generate(recipe: Recipe, prompts: Sequence[str | Messages]) -> list[dict[str, Any]]:
    """Return responses to texts or conversations: one dict a sample with prompt, response, response_tokens, finish and log-probs (sums)."""
    with session(recipe, "generate", texts=prompts) as s:
        with s.controller.generating():
            samples = s.controller.generate(
                s.inputs.prompts,
                s.sampling(),
                recipe.rollout.samples_per_prompt,
                f"{recipe.run.seed}/generate",
            )
        return [
            {
                "prompt": prompts[group],
                "response": made.text,
                "response_tokens": made.response_tokens,
                "finish": made.finish,
                "logprob": made.logprob,
                "raw_logprob": made.raw_logprob,
            }
            for group, made in zip(samples.groups, samples.generated, strict=True)
        ]


@contextmanager
def answering(recipe: Recipe) -> Iterator[Callable[[Messages, Callable[[str], None]], str]]:
    """Keep the model awake, and yield what answers a conversation: it tells the answer piece by piece, as it is generated where one
    rank in this process does that, and returns it. It raises UserError for a conversation the model cannot read.

    Conversations grow up to the model's context, unless the recipe gives data.max_prompt_tokens; in vLLM and SGLang, which keep room for the
    longest sample in any case, up to that key's default.
    """
    with session(recipe, "generate") as s, s.controller.generating():
        turns, data = itertools.count(), recipe.data
        if "max_prompt_tokens" not in data.model_fields_set:
            room = max(s.inputs.shape.max_positions - recipe.rollout.max_response_tokens, 1)
            data = data.model_copy(update={"max_prompt_tokens": room})

        def answer(conversation: Messages, tell: Callable[[str], None]) -> str:
            prompts = make_prompts([conversation], data, s.inputs.tokenizer).prompts
            pieces = TextPieces(decoder(s.inputs.tokenizer), recipe.rollout.stop, tell)
            s.controller.overhear(pieces.add)
            seed = f"{recipe.run.seed}/chat/{next(turns)}"
            said = s.controller.generate(prompts, s.sampling(), 1, seed, title="answer").generated[0].text
            pieces.end(said)
            return said

        yield answer


def evaluate(recipe: Recipe, samples: Path | None = None) -> dict[str, float]:
    """Return what an evaluation on the recipe's held-out prompts comes to. samples: write what was generated and scored there, a JSON object a
    line. Raises UserError where that cannot be written."""
    with session(recipe, "eval") as s:
        results = evaluate_session(s, 0, show_all=samples is not None)
        if samples is not None:
            with writing(samples):
                shutil.copyfile(s.observer.directory.samples, samples)
        return results
