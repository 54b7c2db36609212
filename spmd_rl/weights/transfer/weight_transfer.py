"""Carry out a plan: copy what is here, exchange what is not, with bytes on the wire only for what a rank lacks."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.status import set_status
from spmd_rl.platforms import current
from spmd_rl.weights.transfer.boxes import Box, Index, Piece, Shard, view
from spmd_rl.weights.transfer.dtypes import DTypes, check_same
from spmd_rl.weights.transfer.transfer_schedule import Plan, Round

if TYPE_CHECKING:
    from spmd_rl.platforms.cpu_peer_memory import PeerMemory

Tensors = Mapping[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank took in: bytes received from other ranks, and bytes copied on the rank."""

    network_bytes: int
    local_bytes: int


def same_parameters(source: Shard, destination: Shard) -> dict[str, str]:
    """Map destination parameters to the source parameters that are equal: the same boxes in the same places."""

    def contents(shard: Shard) -> dict[tuple[Index, frozenset[tuple[Box, Index]]], str]:
        return {
            (shard.params[name], frozenset((piece.box, piece.at) for piece in pieces)): name
            for name, pieces in shard.by_param.items()
            if pieces
        }

    here = contents(source)
    return {name: here[content] for content, name in contents(destination).items() if content in here}


class WeightTransfer:
    """Carries out one plan, as often as the weights change.

    All ranks run it together. `source`: this rank's source shard. `control`: a group for small things that the ranks
    tell each other (the first run agrees on dtypes). `sources`: all ranks' source shards; with them, ranks on one
    machine read what they miss from each other's memory, where that is allowed.
    """

    def __init__(
        self,
        plan: Plan,
        source: Shard,
        control: dist.ProcessGroup | None = None,
        sources: Sequence[Shard] | None = None,
    ) -> None:
        self.plan = plan
        self.sources = sources
        self.source = source
        self.control = control
        self._dtypes: DTypes | None = None
        self._memory: PeerMemory | None = None
        self._places: dict[tuple[int, Piece], Piece] = {}  # (peer, piece here) -> piece there
        self._same = same_parameters(source, plan.destination)

    def dtypes(self, read: Tensors) -> DTypes:
        """Return the dtypes that the ranks' sources have; a collective in the first call."""
        if self._dtypes is None:
            self._dtypes = DTypes(self.source, read, self.control)
        return self._dtypes

    @torch.no_grad()
    def run(
        self, read: Tensors, write: Tensors | Writer, written: Callable[[str], None] = lambda name: None
    ) -> Traffic:
        """Fill this rank's destination shard from all ranks' source tensors.

        `read`: parameter -> tensor of this rank's source shard. `write`: parameter -> tensor, filled in place (padding
        is left alone), or a function that gets each parameter (name, tensor) once, when it is complete, padding zero.
        That tensor is lent: it may be a view of a source; use it before returning and don't change it. Source and
        destination have the same dtype. A mapping with a method `lend` (name, tensor) is asked whether a complete
        parameter that this rank has anyway will do as it is, so that nothing is copied. `written` hears of each
        parameter once, when all of it is in its place.

        While one round's messages arrive, the next round's are on their way: at most two rounds are held.
        """
        dtypes = self.dtypes(read)
        device = next((t.device for t in read.values()), torch.device("cpu"))
        staging: _Staging | None = None
        target: Tensors | _Staging
        if isinstance(write, Mapping):
            target = write
        else:
            target = staging = _Staging(self.plan.destination, dtypes, device, write)
        lend = getattr(target, "lend", None)
        lent = {name for name, own in self._same.items() if lend is not None and lend(name, read[own])}
        network_bytes = local_bytes = 0
        rounds = self.plan.rounds
        memory = self._reachable()
        if memory is not None:
            memory.publish(read)
        ahead = self._begin(rounds[0], read, dtypes, device) if rounds else None
        for n, step in enumerate(rounds):
            assert ahead is not None
            set_status(doing=f"bucket {n + 1} of {len(rounds)}")
            flight, ahead = ahead, self._begin(rounds[n + 1], read, dtypes, device) if n + 1 < len(rounds) else None
            for here, there in step.local:  # while the messages are on their way
                source = _view(read, here)  # [piece.shape], as all parts below
                if there.param not in lent:
                    _copy(source, _view(target, there), there)
                local_bytes += source.nbytes
            for work in flight.works:
                work.wait()
            for peer, pieces in step.receive.items():
                if memory is not None and memory.reaches(self.plan.rank, peer):
                    network_bytes += self._fetch(memory, peer, pieces, target)
            for buffers in flight.incoming:
                for piece, part in buffers.parts():
                    _copy(part, _view(target, piece), piece)
                    network_bytes += part.nbytes
            del flight
            if staging is not None:
                staging.hand_over(step.complete)
            for name in step.complete:
                written(name)
        if memory is not None:
            set_status(doing="the other ranks read this one's memory")
            memory.release()
        set_status(doing="")
        return Traffic(network_bytes, local_bytes)

    def _begin(self, step: Round, read: Tensors, dtypes: DTypes, device: torch.device) -> "_Flight":
        """Put a round's messages on their way."""
        rank, memory = self.plan.rank, self._memory
        incoming = [
            _Buffers(peer, pieces, dtypes, device)
            for peer, pieces in step.receive.items()
            if memory is None or not memory.reaches(rank, peer)
        ]
        outgoing = [
            _Buffers(peer, pieces, dtypes, device)
            for peer, pieces in step.send.items()
            if memory is None or not memory.reaches(peer, rank)
        ]
        for buffers in outgoing:
            for piece, part in buffers.parts():  # [piece.shape], a view of the buffer
                _copy(_view(read, piece), part, piece)
        return _Flight(incoming, outgoing, self._post(incoming, outgoing))

    def _reachable(self) -> "PeerMemory | None":
        """Return the memory of the other ranks, if any can read any other's; a collective in the first call."""
        peer_memory = current().peer_memory
        if self.sources is None or peer_memory is None or self.plan.world == 1:
            return None
        if self._memory is None:
            control = {"group": self.control}
            self._memory = peer_memory(self.plan.rank, partial(gather, **control), partial(dist.barrier, **control))
        return self._memory if self._memory.any else None

    def _fetch(self, memory: "PeerMemory", peer: int, pieces: Sequence[Piece], target: "Tensors | _Staging") -> int:
        """Read pieces where the peer holds them; returns their bytes."""
        parts = []
        for piece in pieces:
            there = self._places.get((peer, piece))
            if there is None:
                assert self.sources is not None
                there = self._places[peer, piece] = self.sources[peer].locate(piece)
            parts.append((there.param, there.at, _view(target, piece)))
        memory.read(peer, parts)
        return sum(view.nbytes for _, _, view in parts)

    def _post(self, incoming: Sequence["_Buffers"], outgoing: Sequence["_Buffers"]) -> list[dist.Work]:
        ops = [
            dist.P2POp(op, flat, buffers.peer)
            for op, side in ((dist.irecv, incoming), (dist.isend, outgoing))
            for buffers in side
            for flat in buffers.flats.values()
        ]
        return dist.batch_isend_irecv(ops) if ops else []


@dataclass
class _Flight:
    """The messages of one round, until they have arrived."""

    incoming: Sequence["_Buffers"]
    outgoing: Sequence["_Buffers"]
    works: list[dist.Work]


class _Buffers:
    """The flat tensors of one message, one for each dtype in it."""

    def __init__(self, peer: int, pieces: Sequence[Piece], dtypes: DTypes, device: torch.device) -> None:
        self.peer = peer
        self._of = [(piece, dtypes.of(piece.tensor)) for piece in pieces]
        sizes: Counter[torch.dtype] = Counter()
        for piece, dtype in self._of:
            sizes[dtype] += piece.elements
        self.flats = {dtype: torch.empty(n, dtype=dtype, device=device) for dtype, n in sizes.items()}

    def parts(self) -> Iterable[tuple[Piece, torch.Tensor]]:
        """Yield each piece with its part of a flat tensor, in the piece's shape."""
        used: Counter[torch.dtype] = Counter()
        for piece, dtype in self._of:
            low, n = used[dtype], piece.elements
            used[dtype] += n
            yield piece, self.flats[dtype][low : low + n].view(piece.shape)


class _Staging:
    """Destination parameters that exist from their first part to their last one."""

    def __init__(self, shard: Shard, dtypes: DTypes, device: torch.device, write: Writer) -> None:
        self._shard, self._dtypes, self._device, self._write = shard, dtypes, device, write
        self._open: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._open:
            make = torch.zeros if self._shard.padded(name) else torch.empty
            pieces = self._shard.by_param[name]
            dtype = self._dtypes.of(pieces[0].tensor) if pieces else self._dtypes.most  # none: padding only
            self._open[name] = make(self._shard.params[name], dtype=dtype, device=self._device)
        return self._open[name]

    def lend(self, name: str, source: torch.Tensor) -> bool:
        """Take the source's own memory for a parameter that is the same."""
        if source.device != self._device:
            return False
        self._open[name] = source
        return True

    def hand_over(self, names: Iterable[str]) -> None:
        """Write the complete parameters and forget them."""
        for name in names:
            tensor = self[name]
            del self._open[name]
            self._write(name, tensor)


def _view(tensors: "Tensors | _Staging", piece: Piece) -> torch.Tensor:
    return view(tensors[piece.param], piece.at, piece.shape)


def _copy(source: torch.Tensor, target: torch.Tensor, piece: Piece) -> None:
    check_same(source.dtype, target.dtype, piece.tensor)
    target.copy_(source)
