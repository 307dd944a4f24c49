"""What the dashboard's server answers: pages and JSON, with headers that keep a page from loading anything else."""

import json
import math
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from areal.extensions.desk.curves import COLOURS

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(file: str) -> Handler:
    """The handler of the page in `file`, beside this module, with plots.js and the colours in their places."""
    text, plots = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in (file, "plots.js"))
    text = text.replace("/* plots.js */", plots).replace("/* colours */", json.dumps(COLOURS))

    async def show(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    return show


def answer(value: Any) -> web.Response:
    """`value` as JSON."""
    return web.json_response(value, headers=HEADERS)


def finite(value: Any) -> Any:
    """`value` with None in place of NaN and infinities, which JSON in a browser cannot represent."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
