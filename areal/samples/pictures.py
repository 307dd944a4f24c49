"""Pictures as the core has them: digests in a column, and files that it hands on; the extension `pictures` sees."""

from hashlib import blake2b
from typing import Any

import numpy as np

from areal.base import extensions
from areal.samples.trajectory import Group

# The fields of a row that may have pictures, and the field with the digests of its pictures.
FIELDS = ("decoded_image", "image", "images")
DIGESTS = "picture_digests"


def find(name: str) -> Any:
    """Return what the extension `pictures` has as `name`. Raises UserError if the extension is missing."""
    return extensions.need("pictures", name, "a picture").load()


def digest_of(content: bytes) -> str:
    """The name of a picture: its file's digest."""
    return blake2b(content, digest_size=16).hexdigest()


def digests_in(column: np.ndarray | None) -> list[str]:
    """The digests in a column `pictures` of `areal.samples.table.COLUMNS`, each once, in order."""
    if column is None:
        return []
    rows = column[column.any(1)]
    changes = np.append(True, (rows[1:] != rows[:-1]).any(1))[: len(rows)]
    return list(dict.fromkeys(row.tobytes().hex() for row in rows[changes]))


def pictures_of(group: Group) -> list[str]:
    """The digests of the pictures of a group's samples."""
    return list(dict.fromkeys(name for sample in group.trajectories for name in digests_in(sample.pictures)))
