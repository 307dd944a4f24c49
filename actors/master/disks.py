"""Disks of a run that take no writes: what its user is told, whoever waits for them."""

from collections.abc import Sequence

import structlog

from areal.storage.disk import Shortage

# Writers wait at the same time only in part, so that much time without any that waits ends a shortage.
LULL_SECONDS = 3.0
# For so long the end of a shortage is shown.
SHOWN_SECONDS = 60.0

log = structlog.get_logger()


class Disks:
    """`alert`: that the run waits for a disk, in one sentence, and then that it goes on; otherwise empty."""

    def __init__(self) -> None:
        self.alert = ""
        self._began: float | None = None
        self._last = 0.0
        self._folders: list[str] = []

    def look(self, shortages: Sequence[Shortage], now: float) -> None:
        """To be called once a second. shortages: of all actors. now: in seconds."""
        if shortages:
            self._last = now
        if self._began is None:
            if shortages:
                self._began = now  # by the next look, the others that write have met it too
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
