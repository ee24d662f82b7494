"""Requests for one endpoint, from tokens, text or messages."""

from argparse import Namespace

from strandline.bench.serving.prompt_vocabulary import Vocabulary
from strandline.bench.serving.session import Ask, Prompt
from strandline.errors import ConfigError
from strandline.records.tokens import encode


class Maker:
    """Makes requests for one endpoint.

    Args:
        is_chat: make messages, not prompts.
        max_model_len: longest request that the server takes, if it says so; longer ones of a trace are skipped.
    """

    def __init__(self, vocabulary: Vocabulary, options: Namespace, *, is_chat: bool, max_model_len: int | None) -> None:
        self.vocabulary = vocabulary
        self.options = options
        self.is_chat = is_chat
        self.max_model_len = max_model_len
        self.num_skipped = 0

    def of_tokens(self, ids: list[int], max_tokens: int, *, at_s: float = 0.0, think_s: float = 0.0) -> Ask:
        """Ask with these tokens; a chat is sent their text, which may be split into others."""
        if self.is_chat:
            return self.of_messages([{"role": "user", "content": self.vocabulary.decode(ids)}], max_tokens)
        return Ask(ids, max_tokens, encode(ids), at_s, think_s)

    def of_text(self, text: str, max_tokens: int) -> Ask:
        """Ask with a text: as tokens where there is a tokenizer."""
        if self.is_chat:
            return self.of_messages([{"role": "user", "content": text}], max_tokens)
        ids = self.vocabulary.encode(text, add_special_tokens=True)
        prompt: Prompt = text if ids is None else ids
        return Ask(prompt, max_tokens, None if ids is None else encode(ids))

    def of_messages(self, messages: list[dict[str, str]], max_tokens: int, *, think_s: float = 0.0) -> Ask:
        """Ask with a conversation: as messages, or as the tokens that the tokenizer's template makes of them."""
        ids = self.vocabulary.render(messages)
        tokens = None if ids is None else encode(ids)
        if self.is_chat:
            return Ask([dict(message) for message in messages], max_tokens, tokens, think_s=think_s)
        if ids is None:
            raise ConfigError("conversations need a tokenizer with a chat template, or --backend openai-chat")
        return Ask(ids, max_tokens, tokens, think_s=think_s)
