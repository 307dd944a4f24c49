"""The rows to train on, by their index in the data."""

import contextlib
import functools

import structlog

from actors.sampling.jobs import SampleFailed
from actors.sampling.sampling import Prompts
from actors.sampling.services import Services
from areal.base.errors import ToolError, UserError, explain
from areal.config import Config
from areal.data.rows import Row
from areal.samples.pictures import find

# The number of rows ahead of a new group for which images are pulled in advance.
ROWS_AHEAD = 8

log = structlog.get_logger()


class TrainingRows:
    """See the module."""

    def __init__(self, config: Config, source: Prompts, services: Services) -> None:
        self._config, self._source, self._services = config, source, services

    def read(self, index: int) -> Row:
        """The row of the data at the index. Raises SampleFailed if the row cannot be used."""
        try:
            row = self._source.row(index)
        except Exception as error:  # a bad row, or a data set that cannot be read; libraries raise anything
            log.error("row failed", row=index, exc_info=error)
            raise SampleFailed("row", f"row {index} of the data cannot be used: {error}") from None
        if row.pictures:
            with explain(UserError, "{why}", functools.partial(SampleFailed, "row")):
                find("check")(self._config)
        if too_long := self._services.too_long(row):
            raise SampleFailed("long", too_long)
        return row

    def prepare_ahead(self, index: int) -> None:
        """Have tools prepare for the next rows, for example pull images of containers."""
        for tool in self._services.tools.expecting():
            for later in range(index + 1, index + 1 + ROWS_AHEAD):
                with contextlib.suppress(SampleFailed, ToolError):  # raised again once the row is used
                    tool.expect(self.read(later))
