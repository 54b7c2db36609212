"""Bring a checkpoint together where nodes share no disk: each has kept the files of its own ranks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.config import Config
from spmd_rl.data.digests import UNREADABLE, digest, digests_of
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.status import doing
from spmd_rl.distributed.world import World
from spmd_rl.runlog.checkpoint_store import FILES, STATE, CheckpointStore, listed_files, sizes_of, step_of
from spmd_rl.runlog.run_dir import CHECKPOINTS

_PIECE_BYTES = 16 << 20
_NAMED = 3
"""Files that a message names, at most."""


class NodeParts:
    """Hold what this node lacks of the checkpoint that a run goes on from, while it is read."""

    def __init__(self, config: Config, run_dir: Path, world: World) -> None:
        self.world = world
        self.store = CheckpointStore(run_dir / CHECKPOINTS, config.checkpoint)
        self._leads, self._brought = world.local_rank == 0, list[Path]()
        run_dir.mkdir(parents=True, exist_ok=True)  # hang reports of this node's ranks, and the like, come here

    def bring(self, resume: str) -> list[str]:
        """Give each node all files of the newest checkpoint that is whole, or of the one that `resume` names.

        Returns what there is to say of newer ones. A collective act. Raises ValueError, on all ranks, of a named one.
        """
        notes: list[str] = []
        own = [saved.path.name for saved in (*self.store.after(-1),)] if self._leads else []
        steps = {name for names in gather(own, self.world.payload) for name in names}
        for name in sorted(steps, key=lambda name: step_of(Path(name)) or 0, reverse=True):
            wrong = self._bring(self.store.directory / name)
            if not wrong:
                break
            notes += [f"checkpoint.resume = {resume}: passed over, {problem}" for problem in wrong]
        if resume not in ("auto", "never") and (wrong := self._bring(Path(resume))):
            raise ValueError(f"checkpoint.resume = {resume}: {'; '.join(wrong)}")
        return notes

    def begin_after(self, step: int) -> None:
        """Move what this node has of later steps aside, as rank 0's node does; of a run that begins anew everything."""
        if self._leads and self.world.node and (later := self.store.after(step)):
            aside = self.store.directory.parent / "earlier"
            number = sum(1 for _ in aside.glob("*")) + 1
            for saved in later:
                (aside / f"{number}" / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
                saved.path.rename(aside / f"{number}" / CHECKPOINTS / saved.path.name)

    def drop(self) -> None:
        """Remove what other nodes keep: it is read. A collective act."""
        gather(None, self.world.payload)
        for path in self._brought:
            path.unlink(missing_ok=True)
        self._brought = []

    def _bring(self, directory: Path) -> list[str]:
        """Give each node all files of a checkpoint; returns what is wrong with it, alike on all ranks."""
        held = self._held(directory)
        listings = sorted({listing for listing, _ in held if listing})
        if len(listings) != 1:
            what = "no node has its list of files" if not listings else "the nodes' lists of its files differ"
            return [f"{directory / FILES}: {what}"]
        try:
            files = listed_files(listings[0])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return [f"{directory / FILES}: can't be read ({error})"]
        owners = {
            name: next((n for n, (_, has) in enumerate(held) if has.get(name) == entry["bytes"]), None)
            for name, entry in files.items()
        }
        if wrong := _lacking(directory, files, owners) or self._harmed(directory, files, owners):
            return wrong
        with doing(f"brings the nodes' parts of {directory} together"):
            for name in sorted(files):
                lacking = [n for n, (_, has) in enumerate(held) if has.get(name) != files[name]["bytes"]]
                if lacking and (why := self._send(directory, name, files[name], owners[name] or 0, lacking)):
                    return [why]
        if self._leads and not held[self.world.node][0]:
            (directory / FILES).write_text(listings[0], encoding="utf-8")
            self._brought.append(directory / FILES)
        gather(None, self.world.payload)  # all is there
        return []

    def _held(self, directory: Path) -> list[tuple[str, dict[str, int]]]:
        """Return of each node its list of a checkpoint's files, and the sizes of those that it has."""
        mine: tuple[str, dict[str, int]] | None = None
        if self._leads:
            try:
                listing = (directory / FILES).read_text(encoding="utf-8")
            except (OSError, ValueError):
                listing = ""
            mine = listing, sizes_of(directory)
        return [(found[0], found[1]) for found in gather(mine, self.world.payload) if found]

    def _harmed(self, directory: Path, files: Mapping[str, Any], owners: Mapping[str, int | None]) -> list[str]:
        """Return which files hold other bytes than were written; each node reads those that it has, once."""
        here = [name for name in files if owners[name] == self.world.node]
        mine = here[self.world.local_rank :: self.world.ranks_per_node]
        with doing(f"proves this node's part of {directory} whole"):
            found = digests_of(directory, mine)
        wrong = [
            f"{directory / name} on node {self.world.node}: "
            + (value if value.startswith(UNREADABLE) else "other bytes than were written")
            for name, value in found.items()
            if value != files[name]["digest"]
        ]
        return [problem for part in gather(wrong, self.world.payload) for problem in part][:_NAMED]

    def _send(self, directory: Path, name: str, entry: Mapping[str, Any], owner: int, lacking: Sequence[int]) -> str:
        """Copy a file from the node that has it to those that lack it; returns why that failed, alike on all ranks."""
        world, path, why = self.world, directory / name, ""
        if self._leads and world.node == owner:
            for piece in _pieces(path, entry["bytes"]):
                for node in lacking:
                    dist.send(piece, node * world.ranks_per_node, group=world.payload)
        elif self._leads and world.node in lacking:
            try:
                self._receive(path, entry["bytes"], owner * world.ranks_per_node)
                if digest(path) != entry["digest"]:
                    why = f"{path}: other bytes came from node {owner} than were written"
            except OSError as error:
                why = f"{path}: {error}"
        return next((said for said in gather(why, world.payload) if said), "")

    def _receive(self, path: Path, size: int, source: int) -> None:
        """Write a file that comes in pieces; a full disk is an error when all pieces have come."""
        failed: OSError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = path.with_name(path.name + ".part").open("wb")
        except OSError as error:
            failed, stream = error, None
        for start in range(0, size, _PIECE_BYTES):
            piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8)
            dist.recv(piece, source, group=self.world.payload)
            try:
                if stream is not None and failed is None:
                    stream.write(piece.numpy().data)
            except OSError as error:
                failed = error
        if stream is not None:
            stream.close()
        if failed is not None:
            raise failed
        path.with_name(path.name + ".part").rename(path)
        if path.name != STATE:
            self._brought.append(path)


def _lacking(directory: Path, files: Mapping[str, Any], owners: Mapping[str, int | None]) -> list[str]:
    """Return which node lacks which files that no other has."""
    by_node: dict[int, list[str]] = {}
    for name, owner in owners.items():
        if owner is None:
            by_node.setdefault(files[name].get("node", 0), []).append(name)
    return [
        f"{directory}: node {node} lacks {', '.join(sorted(names)[:_NAMED])}"
        + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        + ", which it had written and no other node has"
        for node, names in sorted(by_node.items())
    ]


def _pieces(path: Path, size: int) -> Iterator[torch.Tensor]:
    with path.open("rb") as stream:
        for start in range(0, size, _PIECE_BYTES):
            yield torch.frombuffer(bytearray(stream.read(min(_PIECE_BYTES, size - start))), dtype=torch.uint8)
