"""A tokenizer of bytes: most characters beyond ASCII are several tokens."""

from __future__ import annotations

from typing import Any


def byte_tokenizer() -> Any:
    """Ids: 0 end of sequence, 1 pad, then the 256 bytes in order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {"<end>": 0, "<pad>": 1} | {character: byte + 2 for byte, character in bytes_to_unicode().items()}
    rust = Tokenizer(models.BPE(vocab, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<end>", pad_token="<pad>", chat_template=template
    )
