"""Find where a response ends, and the text of it that rules, logged samples and people see."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.config.template_names import CHAT
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.templates import load_template
from spmd_rl.data.tokens import chat_template, decode
from spmd_rl.errors import ConfigError

_ANSWER = "ANSWER"


def end_tokens(tokenizer: Any, model_path: str, *templates: str | None) -> dict[int, list[str]]:
    """Return the token ids that end a response -> what says so: tokenizer, config, generation config, template.

    `templates`: those of the prompts, as data.template names them; none: the tokenizer's own. Of a template that
    writes an end behind the assistant's turn, as ChatML and its kin do, the turn's end is one.
    """
    found: dict[int, list[str]] = {}
    for said, ids in (
        ("tokenizer", tokenizer.eos_token_id),
        ("config", _of_file(model_path, "config.json")),
        ("generation config", _of_file(model_path, "generation_config.json")),
        ("template", [_turn_end(tokenizer, name or CHAT) for name in dict.fromkeys(templates or (None,))]),
    ):
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int) and token >= 0 and said not in found.setdefault(token, []):
                found[token].append(said)
    return found


def described(tokenizer: Any, ends: Mapping[int, Sequence[str]], stops: Sequence[object]) -> str:
    """Say which ids end a response, or that nothing does."""
    if not ends and not stops:
        return (
            "nothing ends a response: tokenizer, config.json, generation_config.json and template name no end token, "
            "so every one goes on to the limit; set stop or stop_token_ids"
        )
    spelled = [f"{tokenizer.convert_ids_to_tokens(id)} ({id}: {', '.join(said)})" for id, said in ends.items()]
    return f"a response ends at {', '.join([*spelled, *map(repr, stops)])}"


class ResponseText:
    """Decode responses: of the special tokens only those that begin, end or pad a text are left out."""

    def __init__(self, tokenizer: Any, ends: Sequence[int] = (), skip_special_tokens: bool = False) -> None:
        """`ends`: further end tokens. `skip_special_tokens`: leave all special tokens out, tags like <think> too."""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._hidden = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, *ends}
        # SentencePiece and its kin leave the space out that a text's first token begins with; a response is no first.
        line_end = tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
        self._before = line_end if decode(tokenizer, line_end * 2) == "\n\n" else []

    def ids(self, ids: Sequence[int]) -> list[int]:
        """Return those that are shown."""
        return [id for id in ids if id not in self._hidden]

    def __call__(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, [*self._before, *self.ids(ids)], special=not self._skip)[len(self._before) :]


def _of_file(model_path: str, name: str) -> Any:
    file = Path(model_path) / name
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever needs the file says what is wrong with it
        return None
    inner = values.get("text_config") if isinstance(values.get("text_config"), dict) else {}
    return values.get("eos_token_id", inner.get("eos_token_id"))


def templates_of(prompts: Mapping[str, Sequence[Prompt]], named: str | None) -> list[str | None]:
    """Return the templates of a program's prompts; `named`: where there are no prompts yet."""
    return list(dict.fromkeys(prompt.template for split in prompts.values() for prompt in split)) or [named]


def _turn_end(tokenizer: Any, name: str) -> int | None:
    """Return the special token that a template writes right behind the assistant's answer."""
    try:
        template = load_template(name)
    except ConfigError:  # prompts that were prepared with a file that is gone
        return None
    if template.plain or not (template.text or chat_template(tokenizer)):
        return None
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": _ANSWER}]
    chosen = {} if template.text is None else {"chat_template": template.text}
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False, **chosen)
    except Exception:  # templates raise what they like; this one has no finished turn
        return None
    behind = text.rpartition(_ANSWER)[2].lstrip()
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"][:1] if behind else []
    return ids[0] if ids and ids[0] in _special(tokenizer) else None


def _special(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return set(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
