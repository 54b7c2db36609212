"""Find named templates."""

from pathlib import Path

from spmd_rl.config.shipped import folder
from spmd_rl.errors import ConfigError, Problem, did_you_mean

CHAT = "chat"
PLAIN = "plain"
DIRECTORY = folder("configs") / "templates"


def template_file(name: str, knob: str = "data.template") -> Path:
    """Return the file of a named template, or of a path that ends in .jinja; ConfigError names what there is."""
    file = Path(name) if name.endswith(".jinja") else DIRECTORY / f"{name}.jinja"
    if file.is_file():
        return file
    if name.endswith(".jinja"):
        raise ConfigError(Problem(knob, name, "there is no such file", f"name one, or a template in {DIRECTORY}"))
    known = [CHAT, PLAIN, *sorted(path.stem for path in DIRECTORY.glob("*.jinja"))]
    way = did_you_mean(name, known, f"there are {', '.join(known)}, or a .jinja file of your own")
    raise ConfigError(Problem(knob, name, "there is no such template", way))
