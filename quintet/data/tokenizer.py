"""Tokenizers: a model's own, read from its directory, or one of single characters made from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from quintet.data.chat_template import given_template
from quintet.errors import UserError
from quintet.models.hf_config import read_json
from quintet.recipe.schema import Model

# transformers' classes change their names between versions and import slowly; nothing here needs the type.
Tokenizer: TypeAlias = Any

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# Messages one after another with nothing between them: a character model needs no roles, and "=" ends a question.
_PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return what makes text of token ids, special tokens left out."""
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def load_tokenizer(path: str | Path, settings: Model | None = None) -> Tokenizer:
    """Read the tokenizer in a Hugging Face directory; nothing is downloaded, and no code of it runs that `settings` do not trust.

    Args:
        path: directory with tokenizer.json or what else `AutoTokenizer` reads.
        settings: the recipe's section, whose chat_template and trust_remote_code count.

    Raises:
        UserError: no such directory, no tokenizer in it, one that needs code that is not trusted, or one without an
            end-of-sequence token.
    """
    settings = settings or Model()
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"model.path: there is no directory {path}; it must hold config.json and a tokenizer")
    try:
        tokenizer = _read(path, settings.trust_remote_code)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        code = None if settings.trust_remote_code else code_of_tokenizer(path)
        if code is not None:
            raise UserError(
                f"model.path: no tokenizer could be read from {path} without the code that comes with it: auto_map in "
                f"tokenizer_config.json names {code}, and code of a model is not run unasked. Read it, and set "
                "model.trust_remote_code=true to run it in every process of the run; or name a directory whose "
                f"tokenizer.json does without. (transformers: {first_line})"
            ) from error
        raise UserError(
            f"model.path: no tokenizer could be read from {path} ({first_line}); "
            "it needs tokenizer.json and tokenizer_config.json"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model.path: the tokenizer in {path} has no end-of-sequence token, so no response would ever end; "
            'set "eos_token" in its tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if settings.chat_template is not None:
        tokenizer.chat_template = given_template(settings.chat_template).text
    return tokenizer


_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _read(path: Path, trust_remote_code: bool) -> Any:
    """What AutoTokenizer reads, or what tokenizer.json says where its class is one of any tokenizer. Of these AutoTokenizer takes some for
    the usual one of the model's family (beside a qwen2 config it cuts text as Qwen2 does, whatever the file says), and it
    imports what models are made of, torch's compiler among it: more than all else that a process of a run imports."""
    import transformers

    kind = transformers.PreTrainedTokenizerFast if _is_plain(path) else transformers.AutoTokenizer
    return kind.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def _is_plain(path: Path) -> bool:
    try:
        named = read_json(path / "tokenizer_config.json")
    except UserError:  # AutoTokenizer says what is wrong
        return False
    taken = named.get("tokenizer_class") in _PLAIN and "auto_map" not in named
    return taken and (path / "tokenizer.json").is_file()


def code_of_tokenizer(path: Path) -> str | None:
    """Return what tokenizer_config.json names as the tokenizer's own code, such as tokenization_x.TokenizerX; None if nothing."""
    file = path / "tokenizer_config.json"
    named = read_json(file).get("auto_map") if file.is_file() else None
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    classes = named if isinstance(named, list) else [named]
    return next((str(one) for one in reversed(classes) if one is not None), None)


def remote_code_warning(path: Path) -> str:
    """Return what a user should see before code in a model's directory runs."""
    return f"warning: model.trust_remote_code=true: code that comes with {path} runs with the rights of this user"


def check_stops(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise UserError for a string that is to end responses and holds a special token: texts of responses are without these,
    so it would never be found."""
    special = {
        str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    } | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    for stop in stops:
        for token, number in special.items():
            if token in stop:
                raise UserError(
                    f"rollout.stop: {stop!r} would never be found, because responses are read without special tokens, and {token!r} "
                    f"is one; use rollout.stop_token_ids=[{number}]"
                )


def build_char_tokenizer(alphabet: str, directory: str | Path) -> Tokenizer:
    """Make a tokenizer with one token a character, and save it to `directory` for `load_tokenizer`.

    Ids: 0 pad, 1 end of sequence, 2 unknown, then the characters in code point order, whatever the order and
    repeats in `alphabet`. Its chat template joins the messages with nothing between.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *sorted(set(alphabet))])}
    rust = RustTokenizer(models.WordLevel(vocab, unk_token=UNK))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    rust.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        chat_template=_PLAIN_CHAT_TEMPLATE,
    )
    Path(directory).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    return tokenizer
