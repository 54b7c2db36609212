"""Where named templates stand."""

import difflib
from pathlib import Path

CHAT = "chat"
PLAIN = "plain"
DIRECTORY = Path(__file__).resolve().parents[2] / "configs" / "templates"


def template_file(name: str) -> Path:
    """The file of a named template, or of a path that ends in .jinja; ValueError names what there is."""
    file = Path(name) if name.endswith(".jinja") else DIRECTORY / f"{name}.jinja"
    if file.is_file():
        return file
    if name.endswith(".jinja"):
        raise ValueError(f"data.template = {name}: there is no such file; name one, or a template in {DIRECTORY}")
    known = [CHAT, PLAIN, *sorted(path.stem for path in DIRECTORY.glob("*.jinja"))]
    near = difflib.get_close_matches(name, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}, or a .jinja file of your own"
    raise ValueError(f"data.template = {name}: there is no such template; {meant}")
