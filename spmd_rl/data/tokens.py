"""The door to tokenizers: text to token ids, once, and back."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError, Problem

Message = dict[str, Any]
"""{"role": ..., "content": ...}"""


def load_tokenizer(path: str, trust_remote_code: bool = False, knob: str = "model.path") -> Any:
    """Return the tokenizer in a Hugging Face model directory; never looked for anywhere else.

    `knob`: the setting that names the directory.
    """
    directory = Path(path)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        met = "there is no tokenizer in it (tokenizer.json, tokenizer.model or vocab.json)"
        raise ConfigError(Problem(knob, path, met, "copy the tokenizer files of the model there"))
    # One process per rank: threads of the tokenizer's own would compete with the other ranks'.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        met = "its tokenizer needs Python code that lies beside it, and is not run unasked"
        # Programs that only generate have no section `model`.
        setting = "model.trust_remote_code" if "." in knob else "trust_remote_code"
        way = f"read it, and set {setting} to true if you trust it"
        raise ConfigError(Problem(knob, path, met, way)) from error


def render(tokenizer: Any, messages: Sequence[Message], **template: Any) -> list[int]:
    """The chat template's token ids, up to where the assistant begins to answer."""
    return render_all(tokenizer, [messages], **template)[0]


def render_all(tokenizer: Any, conversations: Sequence[Sequence[Message]], **template: Any) -> list[list[int]]:
    """render, for many conversations in one call of the tokenizer."""
    return encode_rendered(tokenizer, render_text(tokenizer, conversations, **template))


def render_text(
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    template: str | None = None,
    enable_thinking: bool | None = None,
    prefix: str = "data.",
) -> list[str]:
    """Return what the chat template makes of each conversation, as text.

    `template`: Jinja in place of the tokenizer's own. `prefix`: stands before the settings' names.
    """
    if not conversations:
        return []
    chosen = spelling(tokenizer, template, enable_thinking, prefix)
    return tokenizer.apply_chat_template(list(conversations), tokenize=False, add_generation_prompt=True, **chosen)


def spelling(
    tokenizer: Any, template: str | None, enable_thinking: bool | None, prefix: str = "data."
) -> dict[str, Any]:
    """Return what a chat template is called with; ConfigError: there is none, or it does not know the setting."""
    spelled = chat_template(tokenizer) if template is None else template
    if not spelled:
        met = f"the tokenizer in {tokenizer.name_or_path} has no chat template"
        way = f"set {prefix}template to plain, to a name in configs/templates, or add chat_template.jinja to the model"
        raise ConfigError(Problem(f"{prefix}template", "chat", met, way))
    chosen: dict[str, Any] = {} if template is None else {"chat_template": template}
    if enable_thinking is not None:
        if "enable_thinking" not in spelled:
            met = "the template does not know it, so it would change nothing"
            way = f"leave it out, or set {prefix}template to one that does, such as qwen3"
            raise ConfigError(Problem(f"{prefix}enable_thinking", enable_thinking, met, way))
        chosen["enable_thinking"] = enable_thinking
    return chosen


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's own template; empty: it has none."""
    spelled = tokenizer.chat_template
    # Some have several by name.
    return (spelled.get("default") or "") if isinstance(spelled, dict) else spelled or ""


def encode_rendered(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts in which the template has written the special tokens already."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def render_finished(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """The chat template's token ids of conversations that end with the assistant's answer."""
    texts = render_finished_text(tokenizer, conversations) if conversations else []
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def render_finished_text(tokenizer: Any, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Render conversations that end with the assistant's answer as text by the chat template."""
    return tokenizer.apply_chat_template(list(conversations), tokenize=False, add_generation_prompt=False)


def same_tokens(one: Any, other: Any) -> bool:
    """Return True where two tokenizers give every text the same ids."""
    backends: list[Any] = [getattr(tokenizer, "backend_tokenizer", None) for tokenizer in (one, other)]
    if None in backends:
        return type(one) is type(other) and one.get_vocab() == other.get_vocab()
    return backends[0].to_str() == backends[1].to_str()


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of plain texts, with what the tokenizer puts before a text (such as BOS), not behind it."""
    if not texts:
        return []
    encoded, end = tokenizer(list(texts))["input_ids"], getattr(tokenizer, "eos_token_id", None)
    for text, ids in zip(texts, encoded, strict=True):
        if ids and ids[-1] == end and not text.endswith(tokenizer.eos_token):
            del ids[-1]  # a response goes on from here
    return encoded


def opens_answer(tokenizer: Any, template: str | None) -> bool:
    """Return False where a chat template writes something before an answer, and not at the end of a prompt."""
    asked = [{"role": "user", "content": "Q"}]
    answered = [*asked, {"role": "assistant", "content": "ANSWER"}]
    chosen = {} if template is None else {"chat_template": template}
    try:
        shown = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **chosen)
        whole = tokenizer.apply_chat_template(answered, tokenize=False, **chosen)
    except Exception:  # templates raise what they like; the prompts' own rendering says so
        return True
    before, answer, _ = whole.partition("ANSWER")
    return not answer or not before.startswith(shown) or not before[len(shown) :].strip()


def decode(tokenizer: Any, ids: Sequence[int], special: bool = False) -> str:
    """Text of token ids. special: end tokens and the like are shown."""
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def fingerprint(tokenizer: Any) -> str:
    """A hash of all that decides which token ids a text has: the same for the same files, whatever their directory."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    special = json.dumps(getattr(tokenizer, "special_tokens_map", {}), sort_keys=True, default=str)
    return text_fingerprint(rules + special)


def text_fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
