"""Find out that rows of a source have what its settings ask for, without reading them all."""

from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.data.sources.questions import Columns, Reading
from spmd_rl.data.sources.row import BadRows
from spmd_rl.data.sources.rows import read_rows
from spmd_rl.data.templates import Template


def try_rows(dataset: DatasetConfig, data: DataConfig, template: Template, split: str) -> None:
    """Raise ValueError where no row of a source, of "train" or "eval", can be used; read on until one can."""
    reading = Reading(dataset.source, BadRows(data.bad_rows))
    columns = Columns(dataset, data, template)
    named = dataset.split if split == "train" else dataset.eval_split or dataset.split
    for one in read_rows(dataset.source, reading.bad, dataset.subset, named, columns.needed, reading.notes):
        try:
            columns.question(one)
        except ValueError as error:
            reading.bad.met(str(error))
        else:
            return
    raise ValueError(f"{dataset.source}: none of its rows can be used: {'; '.join(reading.bad.examples)}")
