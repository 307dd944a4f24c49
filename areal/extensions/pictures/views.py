"""The pictures that a process has looked at, kept because a processor takes a second for a large picture."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from areal.base.errors import UserError
from areal.extensions.pictures.picture_store import PictureStore
from areal.extensions.pictures.vision import Picture, sight_of
from areal.samples.pictures import digest_of

# Bytes of patches that `Views` keeps. The largest picture of Qwen2.5-VL has 24 MiB of patches.
VIEWED_BYTES = 1 << 28


class Views:
    """The latest pictures that the processor of the model in the folder `model` has looked at: at most `limit` bytes,
    but at least one picture. Threadsafe."""

    def __init__(self, model: str, limit: int = VIEWED_BYTES) -> None:
        self._model, self._limit, self._size = model, limit, 0
        self._pictures: OrderedDict[str, Picture] = OrderedDict()
        self._lock = Lock()

    def get(self, name: str) -> Picture | None:
        with self._lock:
            if name in self._pictures:
                self._pictures.move_to_end(name)
            return self._pictures.get(name)

    def look(self, content: bytes) -> tuple[str, Picture | Exception]:
        """Return the digest of a picture, and the picture as the engine takes it or the error."""
        try:
            return digest_of(content), self._look(content)
        except (UserError, ValueError) as error:
            return digest_of(content), error

    def look_all(self, names: Iterable[str], folder: Path, look_ends: Callable[[], None]) -> dict[str, Picture]:
        """Return the pictures stored in `folder` under these names. look_ends: called after each picture."""
        store = PictureStore(folder)

        def look(name: str) -> Picture:
            view = self.get(name) or self._look(store.get(name))
            look_ends()
            return view

        with ThreadPoolExecutor() as threads:
            return dict(zip(names, threads.map(look, names), strict=True))

    def _look(self, content: bytes) -> Picture:
        picture = sight_of(self._model).look(content)
        with self._lock:
            if picture.name not in self._pictures:
                self._size += picture.patches.nbytes
            self._pictures[picture.name] = picture
            while len(self._pictures) > 1 and self._size > self._limit:
                self._size -= self._pictures.popitem(last=False)[1].patches.nbytes
        return picture
