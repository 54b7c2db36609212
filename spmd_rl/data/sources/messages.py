"""Read what a row asks, as text or as a conversation, in the ways that data sets spell them."""

from typing import Any, TypeGuard

from spmd_rl.data.tokens import Message


def is_message(value: object) -> TypeGuard[Message]:
    """Return True for {role, content} of texts."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def plain_text(prompt: object, where: str) -> str:
    """Return a prompt that goes to the model as it is; ValueError where it is no text, or is empty."""
    if not isinstance(prompt, str):
        raise ValueError(
            f"{where} holds {type(prompt).__name__}; data.template = plain needs text, chat also takes messages"
        )
    if not prompt.strip():
        raise ValueError(f"{where} is empty")
    return prompt


def as_text(prompt: object) -> object:
    """Return a conversation with texts in place of contents in parts, the place of a picture being <image>."""
    return [_as_text(message) for message in prompt] if isinstance(prompt, list) else prompt


def _as_text(message: object) -> object:
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    texts = [_part(part) for part in parts]
    return message if None in texts else message | {"content": "".join(filter(None, texts))}


def _part(part: object) -> str | None:
    """Return the text of a part of a message; None for one that is no text, nor the place of a picture or video.

    Tables give each part all keys that any has: those without a value are not there.
    """
    match {key: value for key, value in part.items() if value} if isinstance(part, dict) else {}:
        case {"type": "text", **rest} if rest.keys() <= {"text"}:
            return str(rest.get("text", ""))
        case {"type": "image" | "video" as kind, **rest} if not rest:
            return f"<{kind}>"
    return None


def with_suffix(prompt: Any, suffix: str) -> Any:
    """Return a prompt, or a conversation, that ends with a text; one that asks nothing stays as it is."""
    if suffix and isinstance(prompt, str) and prompt.strip():
        return prompt + suffix
    if suffix and isinstance(prompt, list) and prompt and is_message(prompt[-1]):
        return [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + suffix}]
    return prompt
