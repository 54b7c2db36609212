"""Answer who gives a setting or a file of another program."""

from collections.abc import Iterable

from spmd_rl.config.foreign.foreign_row import Program, Row, Value, said
from spmd_rl.config.foreign.mindspeed_names import MINDSPEED
from spmd_rl.config.foreign.trl_names import TRL
from spmd_rl.config.foreign.verl_names import VERL

PROGRAMS = (MINDSPEED, VERL, TRL)


def foreign_answer(name: str, value: Value, known: Iterable[str]) -> str | None:
    """Return what a setting of another program is here; None: no other one that we know has it.

    `known`: the settings of the program at hand, which may have ours in another section, or not at all.
    """
    here = {full.rpartition(".")[2]: full for full in known} | {full: full for full in known}
    found: dict[Row, list[str]] = {}
    for program in PROGRAMS:
        row = program.row(name)
        if row is None or row.name in here:  # a word that we have too
            continue
        found.setdefault(row, []).append(program.name)
    if not found:
        return None
    row, names = max(found.items(), key=lambda item: (bool(item[0].ours), len(item[1])))
    ours = tuple(here.get(setting) or here.get(setting.rpartition(".")[2], "") for setting in row.ours)
    if not all(ours):
        return None
    return said(names[0], Row(row.name, ours, row.note, _in_place(row, ours)), value)


def foreign_program(content: Value) -> Program | None:
    """Return the program that a file's content is for, where that is not this one."""
    if not isinstance(content, dict):
        return None
    return next((one for one in PROGRAMS if len(one.sections & content.keys()) >= one.enough), None)


def _in_place(row: Row, ours: tuple[str, ...]) -> Value:
    """Return the row's conversion with our settings under the names that they have in the program at hand."""
    places = dict(zip(row.ours, ours, strict=True))
    return lambda value, facts: {places[setting]: one for setting, one in row.settings(value, facts).items()}
