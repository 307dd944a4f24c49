"""The answers of the dashboard's server: pages and JSON, with headers that keep a page from loading anything else."""

from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

import areal.extensions.desk.page as pages

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page(file: Path) -> Handler:
    """The handler of the page in `file`, with the page's styles and scripts inside."""
    text = pages.page(file)

    async def show(request: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    return show


def answer(value: Any) -> web.Response:
    """`value` as JSON, compressed if large."""
    response = web.json_response(value, headers=HEADERS)
    response.enable_compression()
    return response
