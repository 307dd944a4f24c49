"""How pictures are read: a wrong file is a sentence, and whatever its mode, what the model sees is defined."""

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.tiny_pictures import bomb, png

from areal.extensions.pictures import pictured_rows
from areal.extensions.pictures.picture_files import MAX_BYTES, decode, size_of


def stored(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


RED, CLEAR_RED = (255, 0, 0), (255, 0, 0, 0)
PALETTE = Image.new("P", (3, 2), 1)
PALETTE.putpalette([0, 0, 0, *RED])
MODES = {
    "palette": (stored(PALETTE), RED),
    "palette with a transparent colour": (stored(PALETTE, transparency=1), (255, 255, 255)),
    "alpha": (stored(Image.new("RGBA", (3, 2), CLEAR_RED)), (255, 255, 255)),
    "half alpha": (stored(Image.new("RGBA", (3, 2), (255, 0, 0, 128))), (255, 127, 127)),
    "grey": (stored(Image.new("L", (3, 2), 7)), (7, 7, 7)),
    "black and white": (stored(Image.new("1", (3, 2), 1)), (255, 255, 255)),
    "16 bits": (stored(Image.new("I;16", (3, 2), 0x8012)), (0x80, 0x80, 0x80)),
    "several frames": (stored(Image.new("RGB", (3, 2), RED), "GIF", save_all=True, append_images=[PALETTE]), RED),
    "CMYK": (stored(Image.new("CMYK", (3, 2), (0, 255, 255, 0)), "TIFF"), RED),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_picture_of_any_mode_is_seen_in_rgb(mode):
    content, colour = MODES[mode]
    picture = decode(content)
    assert (picture.mode, picture.size, size_of(content)) == ("RGB", (3, 2), (3, 2))
    assert (np.asarray(picture) == colour).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright_as_its_exif_says_and_its_size_is_known_before(orientation, kind):
    content = stored(Image.new("RGB", (3, 2)), kind, exif=exif(orientation))
    assert decode(content).size == size_of(content) == ((2, 3) if orientation >= 5 else (3, 2))


def test_damaged_exif_does_not_matter():
    content = stored(Image.new("RGB", (3, 2), RED), exif=b"Exif\0\0MM" + bytes(range(200, 240)))
    assert (np.asarray(decode(content)) == RED).all() and size_of(content) == (3, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no picture in one of the formats PNG, JPEG"),
        (b"<svg/>", "no picture in one of the formats PNG, JPEG"),
        (bomb(9_000, 8_000), "9000 x 8000 = 72000000 pixels, more than"),
        (bomb(100_000, 100_000), "too large"),
        (bytes(MAX_BYTES + 1), "bytes, more than"),
    ],
)
def test_what_is_no_picture_or_a_bomb_is_told_before_anything_is_decoded(content, why):
    with pytest.raises(ValueError, match=why):
        size_of(content)


def test_a_picture_that_is_cut_short_is_told():
    with pytest.raises(ValueError, match="it is damaged"):
        decode(png(64, 64, 0)[:-3000])


def test_a_palette_picture_without_its_palette_is_damaged():
    picture = Image.new("P", (4, 4))
    picture.save(file := io.BytesIO(), "PNG")
    content = file.getvalue()
    start = content.index(b"PLTE") - 4
    length = int.from_bytes(content[start : start + 4])
    with pytest.raises(ValueError, match="damaged"):
        decode(content[:start] + content[start + 12 + length :])


@pytest.mark.parametrize("kind", ["device", "pipe", "large"])
def test_a_path_that_is_no_regular_file_of_that_size_is_refused(kind, tmp_path, monkeypatch):
    file = Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(file := tmp_path / "a.png")
    if kind == "large":
        (file := tmp_path / "a.png").write_bytes(bytes(100))
        monkeypatch.setattr(pictured_rows, "MAX_BYTES", 99)
    row = {"prompt": "?", "image": {"path": str(file)}}
    assert ("more than 99 bytes" if kind == "large" else "no regular file") in pictured_rows.flaw_of(row, tmp_path)
