"""Installs the toy machine for processes that a test starts."""

from pathlib import Path


def installed(directory: Path) -> list[str]:
    """Return where Python finds the toy machine and what pip writes down of a package: its entry points."""
    about = directory / "toy_machine-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-machine\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[spmd_rl.platforms]\ntoy = toy_machine:TOY\n")
    return [str(directory), str(Path(__file__).parent)]
