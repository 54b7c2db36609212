"""Find the files that come with spmd_rl: configurations, data sets, templates, tools.

In a checkout they stand beside the package, in an installed one inside of it (setup.py says which).
"""

from pathlib import Path
from textwrap import TextWrapper

_PACKAGE = Path(__file__).resolve().parents[1]


def folder(name: str) -> Path:
    """Return a folder of what is shipped: configs, configs/datasets, configs/models, configs/templates, tools."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def shipped_names(kind: str) -> list[str]:
    """Return the names of shipped files of a kind ("datasets", "evaluation", "" for runs), without .yaml."""
    return sorted(path.stem for path in (folder("configs") / kind).glob("*.yaml"))


def shipped_list() -> str:
    """Say what there is by name, for people who look for it in the help."""
    templates = sorted(path.stem for path in (folder("configs") / "templates").glob("*.jinja"))
    said = (
        f"Data sets by name (data.source): arithmetic, {', '.join(shipped_names('datasets'))}.",
        f"Templates by name (data.template): chat, plain, {', '.join(templates)}.",
        "Rules by name: see reward.rules below.",
    )
    lines = TextWrapper(100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(map(lines.fill, said))


def model_sizes(path: str) -> Path | None:
    """Return the shipped directory with the config.json of a model, by the last part of its path or hub name.

    None: there is none. Its weights and tokenizer are not in it.
    """
    home = folder("configs") / "models" / Path(path.partition("@")[0]).name
    return home if (home / "config.json").is_file() else None


def find_file(text: str, kinds: tuple[str, ...]) -> Path | None:
    """Return the YAML file that a text names: one that is there, else a shipped one of these kinds.

    A shipped one is named as in a checkout (configs/datasets/gsm8k.yaml), or by its name, with its kind before it
    (evaluation/lab_smollm2_cpu) or not, with .yaml or not.
    """
    given = Path(text)
    if given.suffix in (".yaml", ".yml") and given.is_file():
        return given
    if given.is_absolute() or given.exists() or given.suffix not in ("", ".yaml"):
        return None
    for kind in kinds:
        home = folder("configs") / kind
        parts = given.parts[:-1]
        if (home / f"{given.stem}.yaml").is_file() and parts in ((), Path(kind).parts, ("configs", *Path(kind).parts)):
            return home / f"{given.stem}.yaml"
    return None
