"""Pictures in the core: digests in a column, and files to pass on. The extension `pictures` decodes files."""

from hashlib import blake2b
from typing import Any

import numpy as np

from areal.base import extensions
from areal.samples.trajectory import Group

# The fields of a row that may have pictures, and the field with the digests of pictures.
FIELDS = ("decoded_image", "image", "images")
DIGESTS = "picture_digests"


def find(name: str) -> Any:
    """Return the object `name` of the extension `pictures`. Raises UserError if the extension is missing."""
    return extensions.need("pictures", name, "a picture").load()


def digest_of(content: bytes) -> str:
    """Return the name of a picture: the digest of the file."""
    return blake2b(content, digest_size=16).hexdigest()


def digests_in(column: np.ndarray | None) -> list[str]:
    """Return the distinct digests in a column `pictures` of `areal.samples.table.COLUMNS`, in order."""
    if column is None:
        return []
    rows = column[column.any(1)]
    changes = np.append(True, (rows[1:] != rows[:-1]).any(1))[: len(rows)]
    return list(dict.fromkeys(row.tobytes().hex() for row in rows[changes]))


def pictures_of(group: Group) -> list[str]:
    """Return the distinct digests of the pictures of a group's samples."""
    return list(dict.fromkeys(name for sample in group.trajectories for name in digests_in(sample.pictures)))
