"""The files of pictures: accepted formats and sizes, and decoding."""

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from areal.base.errors import explain
from areal.samples.pictures import digest_of

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# The most pixels of a picture (96 MiB when decoded), and the most bytes of its file.
MAX_PIXELS, MAX_BYTES = 1 << 25, 1 << 25
_ORIENTATION, _SIDEWAYS = 0x0112, range(5, 9)


def size_of(content: bytes) -> tuple[int, int]:
    """Return width and height in pixels as `decode` gives them, without decoding. Raises ValueError."""
    opened = _open(content)
    width, height = opened.size
    turned = opened.format != "TIFF" and _orientation(opened) in _SIDEWAYS  # Pillow turns a TIFF upright itself
    return (height, width) if turned else (width, height)


def decode(content: bytes) -> "Image":
    """Return the picture in a file, in RGB and upright as its EXIF says. Only the first of several frames is read.
    Transparent pixels become white. Of 16 bits the upper 8 are kept. Raises ValueError."""
    from PIL import Image, ImageOps

    picture = _open(content)
    with explain((OSError, SyntaxError, ValueError), "it is damaged ({why})", ValueError):
        picture.load()
    if picture.mode == "P" and picture.palette is None:
        raise ValueError("it is damaged (it has no palette)")
    if _orientation(picture) > 1:
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise ValueError("its pixels are not integers")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return picture.convert("RGB")


def part_of(content: bytes) -> dict[str, Any]:
    """Return the part of a message that shows the picture in a file. Raises ValueError."""
    width, height = size_of(content)
    return {"type": "image", "digest": digest_of(content), "width": width, "height": height}


def thumbnail(content: bytes, side: int) -> str:
    """Return the picture as a PNG of at most `side` x `side` pixels, in a data URL. Raises ValueError."""
    picture = decode(content)
    picture.thumbnail((side, side))
    picture.save(file := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _open(content: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    if len(content) > MAX_BYTES:
        raise ValueError(f"it has {len(content)} bytes, more than {MAX_BYTES}")
    try:
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"it is no picture in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"it is damaged or too large ({error})") from None
    if (pixels := opened.width * opened.height) > MAX_PIXELS:
        raise ValueError(f"it has {opened.width} x {opened.height} = {pixels} pixels, more than {MAX_PIXELS}")
    return opened


def _orientation(picture: "Image") -> int:
    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF raises anything, and the picture can be read without EXIF
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1
