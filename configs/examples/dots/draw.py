"""Pictures of dots, and rows that ask for the number of dots."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

MOST, SIDE = 6, 56


def draw(random: Random) -> tuple[str, int]:
    """Draw 1 to MOST dots that do not touch. Returns the picture as a data URL, and the number of dots."""
    picture, number, dots = Image.new("RGB", (SIDE, SIDE), (100, 95, 85)), random.randint(1, MOST), []
    while len(dots) < number:
        radius = random.randint(4, 5)
        x, y = (random.randint(radius, SIDE - 1 - radius) for _ in range(2))
        if all((x - a) ** 2 + (y - b) ** 2 > (radius + c + 1) ** 2 for a, b, c in dots):
            dots.append((x, y, radius))
            colour = tuple(random.randint(190, 255) for _ in range(3))
            ImageDraw.Draw(picture).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    picture.save(file := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), number


def write_rows(file: Path, count: int, slip: float = 0.0) -> None:
    """Write rows with a picture, the answer, and a teacher's `completion`, wrong by 1 with probability `slip`."""
    random, lines = Random(file.name), []
    for _ in range(count):
        picture, number = draw(random)
        wrong = random.choice([n for n in (number - 1, number + 1) if 1 <= n <= MOST])
        said = wrong if random.random() < slip else number
        row = {"prompt": [{"role": "user", "content": "<image>how many"}], "images": [picture]}
        lines.append(json.dumps({**row, "answer": str(number), "completion": str(said)}))
    file.write_text("\n".join(lines) + "\n")
