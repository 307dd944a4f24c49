"""The pictures that rollout managers offer to the trainer: the trainer asks for missing pictures, and stores them."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from actors.runtime.actor import HandlesRequests, handles, parked
from areal.base.errors import explain
from areal.samples.pictures import find
from protocols.bus_errors import BusyError
from protocols.messages import Done
from protocols.picture_messages import LackingPictures, OfferPictures, StorePictures
from protocols.transport import Request


class OfferedPictures(HandlesRequests):
    """folder: of the run's pictures. on_disk: does a write, again until the disk has room."""

    def __init__(self, folder: Path, on_disk: Callable[..., Awaitable[Any]]) -> None:
        self._folder = folder
        self._on_disk = on_disk

    @functools.cached_property
    def store(self) -> Any:
        return find("store")(self._folder)

    @handles(OfferPictures)
    async def offer_pictures(self, request: Request[OfferPictures]) -> LackingPictures:
        return LackingPictures(names=tuple(self.store.lacking(request.message.names)))

    @handles(StorePictures)
    async def store_pictures(self, request: Request[StorePictures]) -> Done:
        files = [content.tobytes() for content in request.message.files]
        await use_disk(self._on_disk, request, self.store.put_all, files)
        return Done()


async def use_disk(
    on_disk: Callable[..., Awaitable[Any]], request: Request[Any], use: Callable[..., Any], *arguments: Any
) -> Any:
    """Use the trainer's disk for a request. Raises BusyError if the disk takes no writes while the sender waits."""
    with explain(TimeoutError, "the trainer waits for its disk", BusyError):
        async with parked(request):
            return await on_disk("the spool", use, *arguments)
