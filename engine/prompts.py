"""From what a caller says to token ids: raw text, ids as they are, or chat messages through the template.

Base models come without a template. A chat with one is written out as a plain dialogue, which any language model can
continue; `has_chat_template` says which of the two it is.
"""

import contextlib
from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from typing import Any

Prompt = str | list[int] | list[dict[str, str]]

CUT_MARGIN_TOKENS = 16
ROLES = ("system", "user", "assistant")
USER, ASSISTANT = "User", "Assistant"


class PromptEncoder:
    """Encodes and checks prompts; every refusal is a `ValueError` with one sentence."""

    def __init__(self, tokenizer: Any, vocabulary: int, context: int):
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.context = context
        # No token stands for more characters than this, so a longer text needs no tokenizer to be refused.
        self._longest_token = max(len(token) for token in tokenizer.get_vocab())

    def encode(self, prompt: Prompt, truncate: int | None = None) -> list[int]:
        """Token ids of `prompt`: text with the tokenizer's own special tokens, ids unchanged, or a chat.

        A template writes special tokens itself, so none are added to what it made. With `truncate`, that many ids
        of the right end.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, truncate, add_special_tokens=True)
        elif isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt):
            ids = self._encode_text(self._render(prompt), truncate, add_special_tokens=not self.has_chat_template)
        elif isinstance(prompt, list):
            ids = self._check_ids(prompt[-truncate:] if truncate else prompt)
        else:
            raise ValueError(
                f"prompt must be text, a list of token ids or a list of chat messages, not {type(prompt).__name__}"
            )
        if not ids:
            raise ValueError("prompt must not be empty")
        return ids[-truncate:] if truncate else ids

    def encode_all(self, prompts: SequenceOf[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, without those that this model does not take."""
        encoded = []
        for prompt in prompts:
            with contextlib.suppress(ValueError):
                encoded.append(self.encode(prompt))
        return encoded

    @property
    def has_chat_template(self) -> bool:
        """Whether chats go through the model's own template; else they are a plain dialogue ("User: ...")."""
        return bool(self.tokenizer.chat_template)

    @property
    def turn_end(self) -> tuple[str, ...]:
        """Stop strings that end an answer of a chat, where the model has not been taught a token for it."""
        return () if self.has_chat_template else (f"\n{USER}:",)

    def fit_chat(self, messages: SequenceOf[dict[str, str]], max_new_tokens: int) -> tuple[list[dict[str, str]], int]:
        """The messages without as many of the oldest turns as the context asks for, and how many were dropped.

        The system message and the last message always stay.
        """
        messages = list(messages)
        first = 1 if messages and messages[0]["role"] == "system" else 0
        # A turn is a question and its answer; never begin with an answer.
        last = len(messages) - 1
        later = [n for n in range(first + 1, last + 1) if n == last or messages[n]["role"] == "user"]
        # Each message has a token at least: of more of them than the context has, nothing needs to be encoded.
        begins = [n for n in [first, *later] if n + self.context > last]

        def kept(begin: int) -> list[dict[str, str]]:
            return [*messages[:first], *messages[begin:]]

        begin = begins[bisect_left(begins[:-1], True, key=lambda begin: self._fits(kept(begin), max_new_tokens))]
        return kept(begin), begin - first

    def _fits(self, messages: list[dict[str, str]], max_new_tokens: int) -> bool:
        try:
            return len(self.encode(messages)) + max_new_tokens <= self.context
        except TooLong:
            return False

    def _encode_text(self, text: str, truncate: int | None, *, add_special_tokens: bool) -> list[int]:
        if not text:
            raise ValueError("prompt must not be empty")
        if truncate and truncate < self.context:  # else what is cut off is not what keeps the text from fitting
            # The margin keeps the cut away from the tokens that stay.
            text = text[-self._longest_token * (truncate + CUT_MARGIN_TOKENS) :]
        elif len(text) > self._longest_token * self.context:
            raise TooLong(f"prompt is too long: {len(text):,} characters do not fit a context of {self.context} tokens")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt must be valid Unicode text; character {error.start} is half of a surrogate pair"
            ) from None
        # Not verbose: a text that is too long is refused with a sentence, not logged.
        try:
            return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        except Exception as error:
            raise ValueError(f"this model's tokenizer does not take this text ({type(error).__name__})") from error

    def _render(self, messages: list[Any]) -> str:
        for message in messages:
            if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
                raise ValueError(f"each chat message must have a role ({', '.join(ROLES)}) and a text as its content")
        if not self.has_chat_template:
            return _dialogue(messages)
        try:
            return self._apply_template(messages)
        except ValueError:
            # Some models (Gemma) know no system role; what it says then opens the first question.
            if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "user":
                raise
            first = {"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}
            return self._apply_template([first, *messages[2:]])

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse what their model was not made for, in their own words
            reason = " ".join(str(error).split())[:160]
            raise ValueError(f"this model's chat template does not take these messages: {reason}") from error

    def _check_ids(self, ids: list[Any]) -> list[int]:
        if len(ids) > self.context:
            raise TooLong(f"prompt is too long: {len(ids)} tokens do not fit a context of {self.context}")
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocabulary:
                raise ValueError(f"prompt's token ids must be whole numbers from 0 to {self.vocabulary - 1}")
        return list(ids)


def _dialogue(messages: list[dict[str, str]]) -> str:
    """The messages as plain text that ends where the assistant's turn begins; what the system says is a preface."""
    names = {"system": "", "user": f"{USER}: ", "assistant": f"{ASSISTANT}: "}
    turns = [names[message["role"]] + message["content"] for message in messages]
    return "\n".join([*turns, f"{ASSISTANT}:"])


class TooLong(ValueError):
    """The prompt alone is longer than the context."""


def check_length(prompt_tokens: int, new_tokens: int, name: str, limit: int) -> None:
    """`ValueError` unless prompt and answer together stay within `limit`."""
    if prompt_tokens + new_tokens > limit:
        raise ValueError(
            f"prompt ({prompt_tokens} tokens) and {name} ({new_tokens}) must together be at most {limit} tokens: "
            "shorten one of them"
        )
