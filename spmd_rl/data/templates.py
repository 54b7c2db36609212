"""Templates of prompts: the tokenizer's own chat template, a named one, or none."""

from dataclasses import dataclass

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


def load_template(name: str, knob: str = "data.template") -> Template:
    """Return a template by its name; ConfigError says what there is. `knob`: the setting that names it."""
    if name in (CHAT, PLAIN):
        return Template(name)
    return Template(name, template_file(name, knob).read_text(encoding="utf-8"))
