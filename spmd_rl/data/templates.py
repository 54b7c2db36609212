"""Templates of prompts: the tokenizer's own chat template, a named one, or none."""

from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config.template_names import CHAT, PLAIN, template_file


@dataclass(frozen=True)
class Template:
    name: str
    """As data.template names it."""
    text: str | None = None
    """Jinja that takes `messages`, `add_generation_prompt` and the tokenizer's special tokens. None: the tokenizer's
    own (chat), or none (plain)."""

    @property
    def plain(self) -> bool:
        return self.name == PLAIN


def load_template(name: str) -> Template:
    """The template of data.template; ValueError says what there is."""
    if name in (CHAT, PLAIN):
        return Template(name)
    return Template(name, Path(template_file(name)).read_text(encoding="utf-8"))
