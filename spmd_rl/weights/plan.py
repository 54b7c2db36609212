"""Who sends which part of a model to whom, so that every rank's destination shard is filled once: pure arithmetic."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spmd_rl.weights.layout import Box, Index, Piece, Shard, intersect, refine, split


class Part(NamedTuple):
    """A box of a Hugging Face tensor, at `at` in a parameter of this rank."""

    box: Box
    param: str
    at: Index


class Copy(NamedTuple):
    """A part that this rank already holds in its source shard."""

    source: Part
    destination: Part


@dataclass(frozen=True, slots=True)
class Message:
    """The parts that go to or come from one peer, in the order that both sides know."""

    peer: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """What happens at once: at most a bucket's worth of elements reach a rank in one round.

    `complete`: destination parameters that have all their parts after this round.
    """

    local: tuple[Copy, ...]
    send: tuple[Message, ...]
    receive: tuple[Message, ...]
    complete: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One rank's part in a move; all ranks' plans have the same number of rounds."""

    rank: int
    world: int
    rounds: tuple[Round, ...]
    destination: Shard = field(repr=False)

    @property
    def local_elements(self) -> int:
        """Elements copied on this rank."""
        return sum(copy.source.box.elements for round in self.rounds for copy in round.local)

    @property
    def sent_elements(self) -> int:
        """Elements sent to other ranks."""
        return _elements(message for round in self.rounds for message in round.send)

    @property
    def received_elements(self) -> int:
        """Elements received from other ranks."""
        return _elements(message for round in self.rounds for message in round.receive)


class _Atom(NamedTuple):
    """A box that a destination class needs, the source pieces that hold it (by class), and its place."""

    box: Box
    holders: dict[int, Piece]
    piece: Piece


Key = frozenset[int]  # the source classes that hold a box


def plan(
    sources: Sequence[Shard],
    destinations: Sequence[Shard],
    rank: int,
    ranks_per_node: int = 0,
    bucket_elements: int = 1 << 24,
) -> Plan:
    """The part of `rank` in moving the sources (one shard a rank) into the destinations.

    A destination element comes from the same rank if that holds it, else from a holder on the same node
    (ranks_per_node; 0: all on one node), else from any holder; among those, from the one that has least to send so far.
    Every rank computes the same assignment, so nothing needs to be agreed. Tensors that different groups of ranks hold
    alternate, so that all pipeline stages send at once. Raises ValueError when no source holds a part.
    """
    world = len(sources)
    assert len(destinations) == world, f"{world} sources, {len(destinations)} destinations"
    source_shards, source_ranks = _classes(sources)
    shards, members = _classes(destinations)
    index = _index(source_shards)
    needs = [_atoms(shard, index) for shard in shards]
    suppliers = _assign(needs, members, source_ranks, ranks_per_node or world, world)

    mine = next(i for i, ranks in enumerate(members) if rank in ranks)
    my_source = next(i for i, ranks in enumerate(source_ranks) if rank in ranks)
    # for each destination class and key: which of its ranks take the box from this one
    takers = [
        {key: [r for r, supplier in by_rank.items() if supplier == rank] for key, by_rank in table.items()}
        for table in suppliers
    ]
    rounds = []
    for atoms_of_classes in _rounds(needs, bucket_elements):
        local, send, receive = [], {}, {}
        for i, atoms in enumerate(atoms_of_classes):
            for atom in atoms:
                key = frozenset(atom.holders)
                destination = Part(atom.box, atom.piece.param, atom.piece.place(atom.box))
                piece = atom.holders.get(my_source)
                for taker in takers[i][key]:
                    source = Part(atom.box, piece.param, piece.place(atom.box))
                    if taker == rank:
                        local.append(Copy(source, destination))
                    else:
                        send.setdefault(taker, []).append(source)
                if i == mine and suppliers[i][key][rank] != rank:
                    receive.setdefault(suppliers[i][key][rank], []).append(destination)
        rounds.append((tuple(local), _messages(send), _messages(receive)))
    return Plan(rank, world, _completed(rounds, shards[mine]), shards[mine])


def _classes(shards: Sequence[Shard]) -> tuple[list[Shard], list[list[int]]]:
    """The distinct shard objects, and the ranks that have each."""
    ranks: dict[int, list[int]] = {}
    for rank, shard in enumerate(shards):
        ranks.setdefault(id(shard), []).append(rank)
    members = list(ranks.values())
    return [shards[group[0]] for group in members], members


def _index(shards: Sequence[Shard]) -> dict[str, dict[Box, dict[int, Piece]]]:
    """Tensor -> box -> source class -> its piece."""
    index: dict[str, dict[Box, dict[int, Piece]]] = {}
    for i, shard in enumerate(shards):
        for piece in shard.pieces:
            index.setdefault(piece.tensor, {}).setdefault(piece.box, {}).setdefault(i, piece)
    return index


def _atoms(shard: Shard, index: dict[str, dict[Box, dict[int, Piece]]]) -> list[_Atom]:
    """The shard cut so that each source class holds a part completely or not at all."""
    atoms = []
    for piece in shard.pieces:
        overlaps: dict[Box, dict[int, Piece]] = {}
        for box, holders in index.get(piece.tensor, {}).items():
            common = intersect(box, piece)
            if common is not None:
                overlaps.setdefault(common, {}).update(holders)
        cells = refine(list(overlaps))
        if sum(cell.elements for cell in cells) < piece.elements:
            raise ValueError(f"no rank holds all of {piece.box}, which {piece.param} is made of")
        for cell in cells:
            holders = overlaps.get(cell) if len(cells) == len(overlaps) else None
            if holders is None:
                holders = {}
                for common, some in overlaps.items():
                    if intersect(common, cell) is not None:
                        holders.update(some)
            atoms.append(_Atom(cell, holders, piece))
    return atoms


def _assign(
    needs: list[list[_Atom]], members: list[list[int]], source_ranks: list[list[int]], ranks_per_node: int, world: int
) -> list[dict[Key, dict[int, int]]]:
    """For each destination class and key: the rank that supplies each of the class's ranks."""
    load = [0] * world
    tables = []
    for atoms, ranks in zip(needs, members, strict=True):
        sizes: Counter[Key] = Counter()
        for atom in atoms:
            sizes[frozenset(atom.holders)] += atom.box.elements
        table = {}
        for key, elements in sizes.items():
            holders = sorted({rank for i in key for rank in source_ranks[i]})
            by_node: dict[int, list[int]] = {}
            for holder in holders:
                by_node.setdefault(holder // ranks_per_node, []).append(holder)
            held = set(holders)
            by_rank = {}
            for rank in ranks:
                if rank in held:
                    by_rank[rank] = rank
                    continue
                supplier = min(
                    by_node.get(rank // ranks_per_node, holders), key=lambda r: (load[r], (r - rank) % world)
                )
                load[supplier] += elements
                by_rank[rank] = supplier
            table[key] = by_rank
        tables.append(table)
    return tables


def _rounds(needs: list[list[_Atom]], bucket_elements: int) -> Iterable[list[list[_Atom]]]:
    """The atoms of each destination class, round by round; parameters that share a tensor are in the same rounds."""
    unit_of = _units(needs)
    units: dict[str, list[list[_Atom]]] = {}
    for i, atoms in enumerate(needs):
        for atom in atoms:
            units.setdefault(unit_of[atom.box.tensor], [[] for _ in needs])[i].append(atom)

    # The n-th unit of each group of holders comes before the (n+1)-th of any: all pipeline stages send at once.
    count: Counter[Key] = Counter()
    order = []
    for name, by_class in units.items():
        holders = frozenset(i for atoms in by_class for atom in atoms for i in atom.holders)
        order.append((count[holders], len(order), name))
        count[holders] += 1

    round: list[list[_Atom]] = [[] for _ in needs]
    filled = [0] * len(needs)
    for _, _, name in sorted(order):
        sizes = [sum(atom.box.elements for atom in atoms) for atoms in units[name]]
        if any(filled) and any(f + n > bucket_elements for f, n in zip(filled, sizes, strict=True)):
            yield round
            round, filled = [[] for _ in needs], [0] * len(needs)
        if max(sizes) > bucket_elements:
            yield from _slices(units[name], bucket_elements)
            continue
        for i, atoms in enumerate(units[name]):
            round[i].extend(atoms)
            filled[i] += sizes[i]
    if any(filled):
        yield round


def _slices(unit: list[list[_Atom]], bucket_elements: int) -> Iterable[list[list[_Atom]]]:
    """A unit that is larger than a bucket, as rounds of its own."""
    slices: list[list[list[_Atom]]] = []
    for i, atoms in enumerate(unit):
        n, filled = 0, 0
        for atom in atoms:
            for box in split(atom.box, bucket_elements):
                if filled and filled + box.elements > bucket_elements:
                    n, filled = n + 1, 0
                while len(slices) <= n:
                    slices.append([[] for _ in unit])
                slices[n][i].append(_Atom(box, atom.holders, atom.piece))
                filled += box.elements
    return slices


def _units(needs: list[list[_Atom]]) -> dict[str, str]:
    """Tensor -> a name for the set of tensors that are linked by lying in the same destination parameter."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for atoms in needs:
        first: dict[str, str] = {}
        for atom in atoms:
            tensor = atom.box.tensor
            parent.setdefault(tensor, tensor)
            parent[root(tensor)] = root(first.setdefault(atom.piece.param, tensor))
    return {name: root(name) for name in parent}


def _messages(parts: dict[int, list[Part]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(parts[peer])) for peer in sorted(parts))


def _completed(rounds: list[tuple], shard: Shard) -> tuple[Round, ...]:
    """The rounds with the parameters that each one completes (those without any piece in the first)."""
    last = dict.fromkeys(shard.params, 0)
    for n, (local, _, receive) in enumerate(rounds):
        for part in [copy.destination for copy in local] + [part for message in receive for part in message.parts]:
            last[part.param] = n
    if not rounds and shard.params:
        rounds = [((), (), ())]
    complete: dict[int, list[str]] = {}
    for name, n in last.items():
        complete.setdefault(n, []).append(name)
    return tuple(Round(*parts, tuple(complete.get(n, ()))) for n, parts in enumerate(rounds))


def _elements(messages: Iterable[Message]) -> int:
    return sum(part.box.elements for message in messages for part in message.parts)
