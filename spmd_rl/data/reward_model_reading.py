"""A sample as a reward model reads it: as the policy's own token ids, or as a conversation in its own template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spmd_rl.data import tokens
from spmd_rl.data.sources.prompts import Prompt

_MARK = "spmdrlresponse"
"""Stands for a response; no template changes it."""
_ASKED = 32
"""About so many prompts show how all of them are formatted."""


@dataclass(frozen=True)
class Reader:
    """One reward model's way of reading."""

    reads: Literal["tokens", "conversation"]
    tokenizer: Any = field(repr=False)
    vocabulary: int
    """Rows of the model's embedding."""
    tail: tuple[int, ...] = ()
    """Tokens that its chat template writes after a response: the end of the turn, and what follows that."""

    def described(self) -> str:
        """For the log: what it reads, and at which token it is asked for its score."""
        if self.reads == "conversation":
            return "the conversation in its own chat template and tokenizer, and scores at the last token"
        tail = self.tokenizer.decode(list(self.tail))
        return (
            f"the policy's token ids, and scores at the last token of {tail!r} after the response"
            if tail
            else ("the policy's token ids, and scores at the response's last token")
        )

    def read_all(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[int]], texts: Sequence[str]
    ) -> list[list[int]]:
        """Token ids of samples, up to the token whose value is the score. `texts`: the responses' as text."""
        if self.reads == "tokens":
            return [
                self._with_tail([*prompt.token_ids, *response])
                for prompt, response in zip(prompts, responses, strict=True)
            ]
        said = [
            [*messages_of(prompt), {"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return tokens.render_finished(self.tokenizer, said)

    def _with_tail(self, ids: list[int]) -> list[int]:
        """The ids, ended as the template ends a turn; what the policy has written of that end isn't repeated.

        A policy may write ids that its tokenizer has no text for, in the rows that pad its vocabulary; where the reward
        model has no such row, they are nothing.
        """
        ids = [token for token in ids if token < self.vocabulary]
        there = max(n for n in range(len(self.tail) + 1) if n == 0 or tuple(ids[-n:]) == self.tail[:n])
        return ids + list(self.tail[there:])


def messages_of(prompt: Prompt) -> list[tokens.Message]:
    """The conversation that a prompt ends; one that never was a conversation is one message of a user."""
    return list(prompt.messages) or [{"role": "user", "content": prompt.text}]


def make_reader(
    knob: str,
    reads: Literal["auto", "tokens", "conversation"],
    own: Any,
    policy: Any,
    vocabulary: int,
    prompts: Sequence[Prompt],
) -> Reader:
    """Choose how a reward model with the tokenizer `own` reads `prompts` of the tokenizer `policy`, and responses.

    `knob`: the model's section, for messages. Raises ValueError when it can't read them so.
    """
    same = tokens.same_tokens(own, policy)
    if reads == "auto":
        reads = "tokens" if same and _spells_alike(own, prompts, knob) else "conversation"
    if reads == "tokens":
        if not same:
            raise ValueError(
                f"{knob}.reads = tokens: its tokenizer, in {own.name_or_path}, is another one than the policy's, so "
                "the ids mean other words; set it to conversation, or auto"
            )
        return Reader(reads, own, vocabulary, _tail(own, knob) if own.chat_template else ())
    if not own.chat_template:
        raise ValueError(
            f"{knob}.reads = {reads}: the tokenizer in {own.name_or_path} has no chat template; add "
            "chat_template.jinja to that directory, or, if its tokenizer is the policy's, set it to tokens"
        )
    _tail(own, knob)  # a template that fails, fails now
    return Reader(reads, own, vocabulary)


def _spells_alike(tokenizer: Any, prompts: Sequence[Prompt], knob: str) -> bool:
    """Return True where a tokenizer's chat template makes the prompts' own token ids; some of all parts are tried."""
    some = prompts[:: max(1, len(prompts) // _ASKED)]
    if not tokenizer.chat_template:
        return not any(prompt.messages for prompt in some)
    _tail(tokenizer, knob)  # a template that fails, fails with its own message
    rendered = tokens.render_all(tokenizer, [messages_of(prompt) for prompt in some])
    return all(list(prompt.token_ids) == ids for prompt, ids in zip(some, rendered, strict=True))


def _tail(tokenizer: Any, knob: str) -> tuple[int, ...]:
    """Token ids that the chat template writes after the last response of a finished conversation."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
    try:
        text = tokens.render_finished_text(tokenizer, [said])[0]
    except Exception as error:  # whatever Jinja raises
        raise ValueError(
            f"{knob}.path = {tokenizer.name_or_path}: its chat template can't render a question and an answer "
            f"({type(error).__name__}: {error}); fix chat_template.jinja there"
        ) from error
    _, found, after = text.rpartition(_MARK)
    if not found:
        raise ValueError(
            f"{knob}.path = {tokenizer.name_or_path}: its chat template leaves out the answer, which is to be scored; "
            "fix chat_template.jinja there"
        )
    return tuple(tokenizer(after, add_special_tokens=False)["input_ids"]) if after else ()
