"""Do what an enemy, or a bad disk, does to a checkpoint."""

import io
import pickle
import shutil
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


HARMS = {
    "missing": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "flipped": flip,
    "unreadable": lambda file: (file.unlink(), file.mkdir()),
}


def set_trap(checkpoint: Path, kind: str, marker: Path) -> None:
    """Put a pickle that makes a file where a checkpoint has one of its own; everything else stays as it is."""
    import torch

    training = checkpoint / "training"
    index = pickle.loads((training / ".metadata").read_bytes())
    match kind:
        case "index":
            index.planner_data = Trap(marker)
        case "common":
            kept = torch.load(training / "common.pt", weights_only=True)
            torch.save(kept | {"more": Trap(marker)}, training / "common.pt")
        case "object":
            stream = io.BytesIO()
            torch.save([Trap(marker)], stream)
            (training / "more.distcp").write_bytes(stream.getvalue())
            for place, where in index.storage_data.items():
                if isinstance(index.state_dict_metadata[place.fqn], BytesStorageMetadata):
                    where.relative_path, where.offset, where.length = "more.distcp", 0, len(stream.getvalue())
        case "outside":
            shutil.copy(training / "common.pt", checkpoint.parent / "stolen.pt")
            next(iter(index.storage_data.values())).relative_path = "../../stolen.pt"
    with (training / ".metadata").open("wb") as stream:
        pickle.dump(index, stream)
