"""The dashboard's page of rollouts: lists rollouts by filters, and opens a rollout with its tokens, group and prompt.

The browser sends names of columns and values, never SQL. Queries run in a few threads, with a time limit for each.
"""

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from actors.watching.answers import answer, page
from areal.base.errors import UserError, explain
from areal.base.text import all_shown, shown
from areal.extensions.desk.account import notation
from areal.extensions.desk.pieces import pieces
from areal.extensions.desk.rollout_queries import Rollouts, condition, picture_shown, pictures_of
from areal.extensions.desk.run_view import finite
from areal.samples.tokenizer import token_texts
from areal.storage.record import Record

ROWS = 50
"""Rows of a page."""
QUERIES = 2
"""Queries that run at the same time; further queries wait."""
LONGEST_NUMBER = 9
DIGITS = 5
"""Decimals of log-probs, advantages and returns of tokens."""

PAGE = Path(__file__).with_name("rollouts.html")


class RolloutPages:
    """The page at /rollouts of a run, and the data for the page."""

    def __init__(self, record: Record) -> None:
        self._rollouts, self._record = Rollouts(record), record
        self._threads = ThreadPoolExecutor(QUERIES, "rollouts")
        self._tokenizer = functools.cache(record.configuration.tokenizer)
        self._loading = threading.Lock()  # two threads cannot import transformers at the same time

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/rollouts", page(PAGE)),
            web.get("/rollouts/list", self._list),
            web.get("/rollouts/row", self._row),
            web.get("/rollouts/group", self._group),
            web.get("/rollouts/prompt", self._prompt),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        filters = {name: text for name, text in request.query.items() if name not in ("token", "sort", "order", "page")}
        sort, descending = request.query.get("sort") or "step", request.query.get("order", "desc") == "desc"
        start = ROWS * _number(request, "page")

        def query() -> dict[str, Any]:
            page = self._rollouts.page(condition(filters), sort, descending, ROWS, start)
            counts = {"fates": page.fates, "steps": page.steps, "start": start}
            return {**counts, "rows": page.rows, "notation": notation(self._record)}

        return await self._answer(query)

    async def _row(self, request: web.Request) -> web.Response:
        group, sample, branch = request.query.get("group", ""), _number(request, "sample"), _number(request, "branch")
        return await self._answer(lambda: self._opened(self._rollouts.row(group, sample, branch)))

    async def _group(self, request: web.Request) -> web.Response:
        return await self._answer(lambda: self._rollouts.group(request.query.get("group", "")))

    async def _prompt(self, request: web.Request) -> web.Response:
        return await self._answer(lambda: self._rollouts.prompt(request.query.get("group", "")))

    def _opened(self, row: dict[str, Any]) -> dict[str, Any]:
        with self._loading:
            tokenizer = self._tokenizer()
        of_tokens = {
            name: value and [round(number, DIGITS) for number in value]
            for name, value in row.items()
            if name in ("logprobs", "proximal_logprobs", "advantages", "returns")
        }
        texts = tokenizer and token_texts(tokenizer, row["tokens"])
        pictures = [picture_shown(self._record, name) for name in pictures_of(row)]
        return {**row, **of_tokens, "texts": texts, "pieces": pieces(row["versions"]), "pictures": pictures}

    async def _answer(self, query: Callable[[], Any]) -> web.Response:
        with explain(UserError, "{why}", lambda why: web.HTTPBadRequest(text=shown(why))):
            result = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: all_shown(finite(query())))
        return answer(result)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not text.isdecimal() or len(text) > LONGEST_NUMBER:
        raise web.HTTPBadRequest(text=f"{name} has to be a number")
    return int(text)
