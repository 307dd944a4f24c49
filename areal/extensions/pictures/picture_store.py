"""The pictures of a run. A picture is stored once, in a file named by its digest. The digest is also the checksum."""

from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from areal.base.errors import UserError, explain
from areal.extensions.pictures.picture_files import MAX_BYTES, size_of
from areal.extensions.pictures.pictured_batches import pictures_in
from areal.extensions.pictures.vision import sight_of
from areal.samples.pictures import digest_of, digests_in
from areal.samples.trajectory import Trajectory
from areal.storage.disk import replace


class PictureStore:
    """The picture files in `folder`. The first picture creates the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = Lock()

    def lacking(self, digests: Iterable[str]) -> list[str]:
        """Return the digests without a file."""
        return [digest for digest in digests if not (self.folder / digest).exists()]

    def put_all(self, contents: Iterable[bytes]) -> None:
        """Write the pictures that have no file yet. All are on disk on return. Several threads may put the same
        picture. Raises OSError."""
        with self._lock:
            for content in contents:
                file = self.folder / digest_of(content)
                if not file.exists():
                    self.folder.mkdir(parents=True, exist_ok=True)
                    replace(file, content)

    def get(self, digest: str) -> bytes:
        """Return the file of a picture. Raises UserError if the file is missing or damaged."""
        file = self.folder / digest
        with explain(OSError, f"A picture of the run, {file}, cannot be read ({{why}}): copy it back."):
            content = file.read_bytes() if 0 < file.stat().st_size <= MAX_BYTES else b""  # a pipe has no size
        if digest_of(content) != digest:
            raise UserError(f"A picture of the run, {file}, is damaged: copy it back.")
        return content

    def check(self, trajectory: Trajectory, model: str) -> None:
        """Raise ValueError if a picture is not stored, or has more or fewer placeholders than the model sees parts."""
        digests = digests_in(trajectory.pictures)
        if lacking := self.lacking(digests):
            raise ValueError(f"the picture {lacking[0]} is not stored")
        sight = sight_of(model)
        parts = {digest: sight.tokens(*size_of(self.get(digest))) for digest in digests}
        for sequence in trajectory.sequences():
            pictures_in(sequence.pictures, parts)
