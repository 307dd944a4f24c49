"""The pictures of a training batch: their places among the tokens, and their patches."""

from collections.abc import Mapping, Sequence

import numpy as np

from areal.extensions.pictures.vision import Picture
from areal.samples.trajectory import Trajectory


def pictures_in(column: np.ndarray | None, parts: Mapping[str, int]) -> tuple[list[int], list[str]]:
    """Return the first places and the digests of the pictures in a sequence's column `pictures`. parts: the number of
    parts of a picture, by digest. Raises ValueError if a picture has more or fewer placeholders than parts."""
    places, starts, names = np.flatnonzero(() if column is None else column.any(1)), list[int](), list[str]()
    while column is not None and len(places):
        name = column[places[0]].tobytes().hex()
        run, places = places[: parts[name]], places[parts[name] :]
        if run[-1] - run[0] != parts[name] - 1 or (column[run] != column[run[0]]).any():
            raise ValueError(f"the placeholders of the picture {name} are not as many as it has parts")
        starts.append(int(run[0]))
        names.append(name)
    return starts, names


def positions_of(length: int, starts: Sequence[int], pictures: Sequence[Picture]) -> np.ndarray:
    """Return the positions of a sequence in time, height and width, int64 [3, length] (arXiv 2409.12191, section 2.1).
    A picture's parts count from the position after the preceding token; the next token follows the largest position.

    >>> picture = Picture("digest", np.zeros((2, 3)), grid=(1, 1, 2), parts=(1, 1, 2))
    >>> positions_of(4, [1], [picture]).tolist()
    [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    """
    columns, begin, position = [], 0, 0
    for start, picture in zip(starts, pictures, strict=False):
        columns.append(np.broadcast_to(np.arange(start - begin) + position, (3, start - begin)))
        position += start - begin
        columns.append(np.indices(picture.parts).reshape(3, -1) + position)
        begin, position = start + picture.tokens, position + max(picture.parts)
    columns.append(np.broadcast_to(np.arange(length - begin) + position, (3, length - begin)))
    return np.concatenate(columns, axis=1)


def inputs_of(
    sequences: Sequence[Trajectory], pictures: Mapping[str, Picture]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the inputs of `FlatBatch` for pictures, and its `pictures`. Inputs: `pictures` and `parts`, int32 [T], are
    the numbers of the picture and its part at a placeholder, -1 at other tokens; `places`, int32 [T, 3], are positions.
    Pictures: `patches`, float32 [patches of all, D], and `grids`, int32 [K, 3], of K pictures, as in `Picture`. Raises
    ValueError if tokens do not stand for their pictures."""
    of_pictures = {
        "patches": np.concatenate([picture.patches for picture in pictures.values()]),
        "grids": np.array([picture.grid for picture in pictures.values()], np.int32),
    }
    numbers = {name: number for number, name in enumerate(pictures)}
    columns = []
    for sequence in sequences:
        column = np.full((len(sequence), 5), -1, np.int32)
        starts, names = pictures_in(sequence.pictures, {name: picture.tokens for name, picture in pictures.items()})
        of_sequence = [pictures[name] for name in names]
        for start, picture in zip(starts, of_sequence, strict=True):
            column[start : start + picture.tokens, 0] = numbers[picture.name]
            column[start : start + picture.tokens, 1] = np.arange(picture.tokens)
        column[:, 2:] = positions_of(len(sequence), starts, of_sequence).T
        columns.append(column)
    table = np.concatenate(columns)
    placeholders = {"pictures": table[:, 0].copy(), "parts": table[:, 1].copy(), "places": table[:, 2:].copy()}
    return placeholders, of_pictures
