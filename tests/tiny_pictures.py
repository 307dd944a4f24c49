"""Pictures, and prompts that have them, for tests with tiny models."""

import io

import numpy as np
from PIL import Image

PLACEHOLDER, START, END = 5, 7, 8


def png(width, height, seed):
    """The file of a picture of random pixels."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def prompt_with(pictures, sight, begin):
    """Tokens of a prompt with these pictures, each between two tokens as in a chat; its first tokens are `begin`."""
    prompt = [*begin]
    for picture in pictures:
        prompt += [3, START, *[PLACEHOLDER] * sight.look(picture).tokens, END]
    return [*prompt, 4, 9]
