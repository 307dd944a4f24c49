"""A live web page of a run, made from the files in the run folder: `areal dashboard RUN_FOLDER`. For several runs, a
page with their curves overlaid.

The page loads nothing from elsewhere, and asks the server once a second for new data. If the server listens on an
interface other than loopback, requests need a token.
"""

import hmac
import re
import secrets
from argparse import Namespace
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler

from actors.watching.answers import answer, page
from actors.watching.rollouts_page import RolloutPages
from actors.watching.sessions_page import SessionPages
from areal.base.errors import explain
from areal.extensions.desk.page import PAGES
from areal.extensions.desk.run_view import RunsView, RunView
from protocols.addresses import is_loopback

# A connection that has sent no request for this long is closed.
IDLE_SECONDS = 30.0
# The Host of a request: a name or an address, and a port. `localhost/.evil.example` is neither.
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::[0-9]{1,5})?")


def application(view: RunView | RunsView, token: str | None) -> web.Application:
    """The web application: the page at /, and the data at /data?stamp=STAMP, where STAMP marks the data that the page
    has; for a single run also the pages of rollouts and sessions.

    token: the required value of ?token=. None: no token is required, but the request must name an address of this
    machine. Otherwise the name of any web page could be pointed at this machine, and the page could read the answers.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = HOST.fullmatch(request.host)
        if token is None and not (host and is_loopback(host[1] or host[2])):
            raise web.HTTPForbidden(text="This page is served as http://127.0.0.1 or http://localhost only.")
        origin = request.headers.get("Origin")
        site, mode, dest = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Site", "Mode", "Dest"))
        elsewhere = site in ("cross-site", "same-site") and (mode, dest) != ("navigate", "document")  # a link
        if elsewhere or (origin is not None and urlsplit(origin).netloc != request.host):
            raise web.HTTPForbidden(text="Another web page may not read this one.")
        if token is not None and not hmac.compare_digest(request.query.get("token", "").encode(), token.encode()):
            raise web.HTTPForbidden(text="The token is missing from the address or wrong: add ?token=...")
        return await handler(request)

    async def data(request: web.Request) -> web.Response:
        return answer(view.since(request.query.get("stamp", "")))

    app = web.Application(middlewares=[guarded])
    app.add_routes([web.get("/", page(PAGES / "run.html")), web.get("/data", data)])
    if isinstance(view, RunView):
        app.add_routes(RolloutPages(view.record).routes() + SessionPages(view.record).routes())
    return app


def serve(options: Namespace) -> None:
    """`areal dashboard`: serve the page until interrupted."""
    folders, host, port, token = options.folders, options.host, options.port, options.token
    view = RunView(folders[0]) if len(folders) == 1 else RunsView(folders)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(16)
    address = f"http://{host}:{port}/" + (f"?token={token}" if token else "")
    app = application(view, token)
    with explain(OSError, f"The page cannot be served at {host}:{port} ({{strerror}}): choose another --port."):
        # aiohttp counts from the connection on, so the limit is also for the headers of a request.
        web.run_app(
            app,
            host=host,
            port=port,
            keepalive_timeout=IDLE_SECONDS,
            print=lambda _: print(f"The run is at {address}", flush=True),
        )
