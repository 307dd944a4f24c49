"""Pictures, and prompts that have them, for tests with tiny models."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

PLACEHOLDER, START, END = 5, 7, 8


def png(width, height, seed):
    """The file of a picture of random pixels."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def bomb(width, height):
    """A PNG of a few bytes that says it has so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + header
        + struct.pack(">I", zlib.crc32(header))
        + bytes(4)
        + b"IDAT"
        + bytes(4)
    )


def prompt_with(pictures, sight, begin):
    """Tokens of a prompt with these pictures, each between two tokens as in a chat; its first tokens are `begin`."""
    prompt = [*begin]
    for picture in pictures:
        prompt += [3, START, *[PLACEHOLDER] * sight.look(picture).tokens, END]
    return [*prompt, 4, 9]
