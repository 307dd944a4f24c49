"""The Hugging Face hub without a network: the hub's client would try for a minute, and then name another cause."""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit

OFFLINE = "HF_HUB_OFFLINE"
CONNECT_SECONDS = 5.0


@functools.cache
def reach_hub() -> str:
    """Ask once in a process whether the hub can be reached; return the reason if not, else "". After a failure, this
    process and its children use the files in the cache."""
    from huggingface_hub import constants

    place = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return f"{OFFLINE} is set"
    if any(name.lower() in ("https_proxy", "http_proxy", "all_proxy") for name in os.environ):
        return ""  # the proxy knows the way
    try:
        port = place.port or (80 if place.scheme == "http" else 443)
        socket.create_connection((str(place.hostname), port), CONNECT_SECONDS).close()
    except OSError as error:
        os.environ[OFFLINE] = "1"
        constants.HF_HUB_OFFLINE = True
        if datasets := sys.modules.get("datasets"):
            datasets.config.HF_HUB_OFFLINE = True
        return f"{place.hostname} cannot be reached: {error.strerror or error}"
    return ""
