"""Moves rollouts of undone steps into another folder, when a run goes back."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from areal.storage.rollout_files import ROWS_AT_ONCE, files
from areal.storage.rollouts import writing

log = structlog.get_logger()


def move_rollouts(folder: Path, to: Path, moved: Callable[[str], bool]) -> None:
    """Move the rows of groups for whose ids `moved` is true into files of the same names in another folder. An
    interrupted call is repeated. An unreadable file stays."""
    for path in files(folder):
        try:
            table = pq.read_table(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            log.error(f"The rollouts in {path} cannot be read ({error}): move the file away.")
            continue
        gone = pa.array([moved(group) for group in table["group"].to_pylist()], pa.bool_())
        if not pc.any(gone).as_py():
            continue
        to.mkdir(parents=True, exist_ok=True)
        _replace(to / path.name, table.filter(gone))
        remaining = table.filter(pc.invert(gone))
        if remaining.num_rows:
            _replace(path, remaining)
        else:
            path.unlink()


def _replace(path: Path, table: pa.Table) -> None:
    with writing(path, table.schema) as parquet:
        parquet.write_table(table, row_group_size=ROWS_AT_ONCE)
