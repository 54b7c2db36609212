"""A conversation as rank 0 holds it: messages, what a typed line means, and the settings that can change on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spmd_rl.config.fields import Bounds, knobs, marks
from spmd_rl.config.serving import ChatConfig
from spmd_rl.data.pictures import Picture, size_of
from spmd_rl.data.sampling_params import SamplingParams

HELP = """\
/reset                begin again, with the same system message
/image FILE           show a picture with the next question
/system TEXT          begin again with this system message; without TEXT: none
/set NAME=VALUE ...   temperature, top_p, top_k, min_p, max_tokens, seed; /set alone shows them
/help                 this
/exit                 leave (so do exit, quit and the end of the input, Ctrl-D)
Ctrl-C                stop the answer that is being given"""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens")


@dataclass
class Conversation:
    """Messages so far, and the sampling of the next answer."""

    sampling: SamplingParams
    seed: int
    system: str | None = None
    most_pictures: int = 0
    """Of one conversation; 0: the model sees none."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Without the system message."""
    pictures: list[Picture] = field(default_factory=list)
    """Of the messages, in order, and at the end those that the next question shows."""
    waiting: int = 0
    """Pictures that the next question shows."""

    def asked(self, text: str) -> list[Mapping[str, Any]]:
        """All messages with this question at the end, as a chat template takes them."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.messages, self._question(text)]

    def answered(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.messages += [self._question(question), {"role": "assistant", "content": answer}]
        self.waiting = 0

    def _question(self, text: str) -> Mapping[str, Any]:
        shown = [{"type": "image"}] * self.waiting
        return {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}

    def _begin_again(self) -> None:
        self.messages.clear()
        self.pictures.clear()
        self.waiting = 0

    def _show(self, path: str) -> str:
        """Take a picture for the next question."""
        if not self.most_pictures:
            return "(this model sees no pictures)"
        if len(self.pictures) == self.most_pictures:
            return f"(a conversation shows at most {self.most_pictures} pictures: /reset begins a new one)"
        try:
            picture = Picture(content=Path(path).expanduser().read_bytes())
            width, height = size_of(picture)
        except (OSError, ValueError) as error:
            return f"({path or '/image'}: {error}; nothing is shown)"
        self.pictures.append(picture)
        self.waiting += 1
        return f"({path}, {width} x {height} pixels, is shown with your next question)"

    def obey(self, line: str) -> str | None:
        """Do what a line that begins with / says; returns what there is to say about it, None: leave."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if command in ("/exit", "/quit"):
            return None
        if command == "/help":
            return HELP
        if command == "/image":
            return self._show(rest)
        if command == "/reset":
            self._begin_again()
            return "(a new conversation)"
        if command == "/system":
            self._begin_again()
            self.system = rest or None
            return "(a new conversation, with this system message)" if rest else "(a new conversation)"
        if command == "/set":
            return self._set(rest.split())
        return f"({command}: there is no such command; /help lists them. A question may begin with a space and a /)"

    def _set(self, words: Sequence[str]) -> str:
        known = (*_SAMPLING, "seed")
        types, marked = knobs(ChatConfig), knobs(ChatConfig, extras=True)
        sampling, seed = self.sampling, self.seed
        for word in words:
            name, given, text = word.partition("=")
            name = name.replace("-", "_")
            if not given or name not in known:
                return f"({word}: expected NAME=VALUE, with a name among {', '.join(known)}; nothing was set)"
            try:
                value = types[name](text)
            except ValueError:
                kind = "a whole number" if types[name] is int else "a number"
                return f"({word}: expected {kind}; nothing was set)"
            [bounds] = marks(marked[name], Bounds)
            if not bounds.hold(value):
                return f"({word}: out of range; it must be {bounds}; nothing was set)"
            if name == "seed":
                seed = int(value)
            else:
                sampling = replace(sampling, **{name: value})
        self.sampling, self.seed = sampling, seed
        shown: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING}
        return "(" + ", ".join(f"{name}={value:g}" for name, value in (shown | {"seed": seed}).items()) + ")"


class Thoughts:
    """Tells what a model thinks, between <think> and </think>, from what it says, in a text that comes piece by piece.

    `thinking`: the prompt has opened a <think> already.
    """

    def __init__(self, thinking: bool):
        self.thinking = thinking
        self._held = ""

    def add(self, text: str) -> list[tuple[str, bool]]:
        """(text, whether it is thought) of what is certain now; the beginning of a tag is held back."""
        return self._split(self._held + text, last=False)

    def end(self) -> list[tuple[str, bool]]:
        """The rest."""
        return self._split(self._held, last=True)

    def _split(self, text: str, last: bool) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        while True:
            tag = "</think>" if self.thinking else "<think>"
            at = text.find(tag)
            if at < 0:
                break
            # Both tags are shown as part of the thought.
            if self.thinking:
                found.append((text[: at + len(tag)], True))
                text = text[at + len(tag) :]
            else:
                found.append((text[:at], False))
                text = text[at:]
                found.append((tag, True))
                text = text[len(tag) :]
            self.thinking = not self.thinking
        kept = 0 if last else max(n for n in range(len(tag)) if text.endswith(tag[:n]))
        found.append((text[: len(text) - kept], self.thinking))
        self._held = text[len(text) - kept :]
        return [(piece, thought) for piece, thought in found if piece]
