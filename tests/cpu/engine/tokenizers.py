"""Tokenizers made on the spot: one of printable ASCII characters, one of bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = "<end>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def ascii_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 95 printable characters (ids 0–94, in ASCII order), ``<end>`` (95) and ``<unk>`` (96)."""
    vocab = {chr(code): code - 32 for code in range(32, 127)} | {EOS: 95, "<unk>": 96}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single bytes, so that most characters beyond ASCII span several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
