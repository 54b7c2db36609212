"""Read settings from a command line, strictly, and print --help."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_origin

import tyro

from spmd_rl.config.fields import NAME, knobs, named_section
from spmd_rl.config.foreign.lookup import foreign_answer
from spmd_rl.config.yaml_file import describe, read_words, unknown
from spmd_rl.errors import Problem

TORCHRUN = frozenset(
    "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts "
    "standalone log_dir redirects tee local_addr".split()
)
Settings = TypeVar("Settings")
WHERE = "command line"


def split_words(argv: list[str], problems: list[Problem]) -> tuple[list[str], dict[str, list[str]], bool]:
    """Return (files of --config, setting -> its words, whether help is wanted); the last of a repeated setting wins."""
    groups: list[tuple[str, list[str]]] = []
    wants_help = bare = False
    for word in argv:
        if word in ("-h", "--help"):
            wants_help = True
        elif word.startswith("--") and len(word) > 2:
            name, given, value = word[2:].partition("=")
            groups.append((name.replace("-", "_"), [value] if given else []))
        elif groups and not (bare and "=" in word):
            groups[-1][1].append(word)
        else:
            if not bare:
                problems.append(Problem(word, None, "", "expected --config FILE or --section.setting VALUE", WHERE))
            name, given, value = word.lstrip("+~").partition("=")
            bare = bool(given and re.fullmatch(r"[\w.]+", name))
            if bare:  # Hydra's form: what it is here is said too
                groups.append((name, [value]))
    files = [word for name, words in groups if name == "config" for word in words]
    if any(name == "config" and len(words) != 1 for name, words in groups) or len(files) > 1:
        problems.append(Problem("--config", None, "", "expected one YAML file"))
        files = []
    return files, {name: words for name, words in groups if name != "config"}, wants_help


def known_as(name: str, known: Iterable[str]) -> str:
    """Return a setting's name as `knobs` knows it: with NAME where the user's own name of a section stands."""
    for knob in known:
        before, named, after = knob.partition(f".{NAME}.")
        if named and re.fullmatch(rf"{re.escape(before)}\.\w+\.{re.escape(after)}", name):
            return knob
    return name


def name_sections(
    known: Iterable[str], overrides: dict[str, list[str]], values: dict[str, Any], wants_help: bool
) -> None:
    """Add a section, empty as yet, for each name that only the command line knows; for help, one called NAME."""
    for name in overrides:
        if known_as(name, known) != name:
            values.setdefault(name.rpartition(".")[0] + ".", None)
    for before in {knob.partition(NAME)[0] for knob in known if NAME in knob} if wants_help else ():
        if not any(name.startswith(before) for name in values):
            values[f"{before}{NAME}."] = None


def override(config: Settings, overrides: dict[str, list[str]], problems: list[Problem]) -> Settings:
    """Return the settings with those of the command line in place of theirs, but for those with a mistake."""
    known = knobs(type(config))
    accepted: dict[str, list[str]] = {}
    for name, words in overrides.items():
        kind = known.get(known_as(name, known))
        if name.replace("-", "_") in TORCHRUN:
            met, way = (
                "it is an option of torchrun",
                "write it before -m, or start with `python -m spmd_rl PROGRAM`",
            )
            problems.append(Problem(f"--{name}", " ".join(words) or None, met, way, WHERE))
        elif kind is not None:
            accepted[name] = _spell_booleans(words) if _takes_booleans(kind) else words
        else:
            problems.append(unknown(name, type(config), WHERE, read_words(words)))
    try:
        return _with_words(config, accepted)
    except SystemExit:  # tyro stops at the first mistake; one by one finds them all
        for name, words in accepted.items():
            try:
                config = _with_words(config, {name: words})
            except SystemExit:
                given = " ".join(overrides[name]) or "nothing"
                what = describe(known[known_as(name, known)])
                problems.append(Problem(name, given, "", _stray(words[1:], known) or f"expected {what}", WHERE))
        return config


def _with_words(config: Settings, settings: dict[str, list[str]]) -> Settings:
    """Return the settings with others in place of theirs; only sections that words are for are shown to tyro.

    It makes an option of every setting that it is shown, which takes 0.1 s for all of a run. Raises SystemExit.
    """
    inside: dict[str, dict[str, list[str]]] = {}
    for name, words in settings.items():
        before, _, rest = name.partition(".")
        section = before if dataclasses.is_dataclass(getattr(config, before, None)) else ""
        inside.setdefault(section, {})[rest if section else name] = words
    for section, own in inside.items():
        argv = [word for name, words in own.items() for word in _words(name, words)]
        if section:
            changed = _tyro(argv, getattr(config, section))
            config = dataclasses.replace(config, **{section: changed})  # type: ignore[type-var]
        else:
            config = _tyro(argv, config)
    return config


def _stray(words: list[str], known: Iterable[str]) -> str:
    """Say what is missing in front of a word that follows another setting's value; "": none is such a word."""
    for word in words:
        if word.partition("=")[0] in known and "=" in word:
            return f"write --{word}: a setting has -- in front"
        if word.endswith((".yaml", ".yml")):
            return f"write --config {word}"
        name, given, value = word.lstrip("+~").partition("=")
        if given and (answer := foreign_answer(name, read_words([value]), known)):
            return answer
    return ""


def print_help(default: Any, description: str) -> None:
    """Print every setting with its explanation and its value in `default`, and exit."""
    try:
        _tyro(["--help"], default, description)
    except BrokenPipeError:  # who reads it, as head does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit()


def _program() -> str | None:
    """Return what starts this program as one types it; None: a file, which its name says."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return None
    name = spec.name.removesuffix(".__main__")
    return " ".join(["python", "-m", name, *(sys.argv[1:2] if name == "spmd_rl" else ())])


def _words(name: str, words: list[str]) -> list[str]:
    # One word with "=" may begin with a dash.
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]


def _takes_booleans(kind: Any) -> bool:
    return kind in (bool, bool | None) or "True" in get_args(kind)


def _spell_booleans(words: list[str]) -> list[str]:
    """A bare `--train.recompute` says True, and YAML's true is as good as Python's True."""
    if not words:
        return ["True"]
    return [word.capitalize() if word.lower() in ("true", "false") else word for word in words]


def _tyro(argv: list[str], default: Settings, description: str = "") -> Settings:
    wants_help = argv == ["--help"]
    with contextlib.ExitStack() as quiet:
        if not wants_help:
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return tyro.cli(
            type(default),
            prog=_program(),
            args=argv,
            default=default,
            description=description,
            use_underscores=True,
            # Every setting takes a value: --data.shuffle False, as it is written in the file.
            config=(tyro.conf.FlagConversionOff,),
            registry=_registry(),
        )


def _registry() -> tyro.constructors.ConstructorRegistry:
    """tyro would make one option of each default rule; a run's rules replace the default ones as a whole."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def weights(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if get_origin(info.type) is not dict or named_section(info.type):
            return None

        def read(words: list[str]) -> dict[str, float]:
            if len(words) % 2:
                raise ValueError("expected names with a number each")
            return {name: float(weight) for name, weight in zip(words[::2], words[1::2], strict=True)}

        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="[STR FLOAT ...]",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [str(word) for pair in value.items() for word in pair],
        )

    return registry
