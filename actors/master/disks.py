"""Shortages of disks in a run, and the sentences about them for the user of the run."""

from collections.abc import Sequence

import structlog

from areal.storage.disk import Shortage

# Not all writers wait at every moment, so a shortage ends only after this time without a waiting writer.
LULL_SECONDS = 3.0
# The end of a shortage is shown for this time.
SHOWN_SECONDS = 60.0

log = structlog.get_logger()


class Disks:
    """`alert`: a sentence while the run waits for a disk, then a sentence that the run goes on, else empty."""

    def __init__(self) -> None:
        self.alert = ""
        self._began: float | None = None
        self._last = 0.0
        self._folders: list[str] = []

    def look(self, shortages: Sequence[Shortage], now: float) -> None:
        """Call once a second. shortages: of all actors. now: in seconds."""
        if shortages:
            self._last = now
        if self._began is None:
            if shortages:
                self._began = now  # by the next look, other writers have met the shortage too
            elif now - self._last > SHOWN_SECONDS:
                self.alert = ""
        elif shortages and not self._folders:
            self._folders = list(dict.fromkeys(shortage.folder for shortage in shortages))
            self._tell(
                f"{_sentence(shortages)}. Free some room there, or make it writable, and the run goes on by itself; "
                f"Ctrl-C ends it, and --resume continues it."
            )
        elif not shortages and now - self._last >= LULL_SECONDS:
            if self._folders:
                seconds = self._last - self._began
                self._tell(
                    f"The run goes on: the disk of {' and '.join(self._folders)} refused writes for {seconds:.0f} s."
                )
            self._began, self._folders = None, []

    def _tell(self, alert: str) -> None:
        self.alert = alert
        log.warning(alert)


def _sentence(shortages: Sequence[Shortage]) -> str:
    by_folder: dict[str, list[Shortage]] = {}
    for shortage in shortages:
        by_folder.setdefault(shortage.folder, []).append(shortage)
    sentence = "; ".join(f"{there[0].disk}: {', '.join(s.waits for s in there)}" for there in by_folder.values())
    return sentence[0].upper() + sentence[1:]
