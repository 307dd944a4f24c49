"""The small sibling's episodes: tau2's mock domain with a customer by script. A server imports tau2 for all samples.

`episodes.py run`, in the environment of tau2, starts the server and the run. `episodes.py`, once per sample, has the
server play a row, and posts the reward.
"""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import agent

FOLDER = Path("build/tau2")
SOCKET = str(FOLDER / "socket")


class Episode(StreamRequestHandler):
    def handle(self) -> None:
        row, policy = json.loads(self.rfile.readline())
        self.wfile.write(json.dumps(agent.play(row, policy, user="reader")).encode())


def prepare_tau2() -> None:
    """Add a customer to tau2 who reads out the scenario, and ends the conversation at the clerk's next text."""
    import httpx
    import litellm
    from loguru import logger
    from tau2.data_model.message import UserMessage
    from tau2.registry import registry
    from tau2.user.user_simulator import STOP, UserSimulator

    class Reader(UserSimulator):
        lines = None

        def _generate_next_message(self, message, state):
            self.lines = self.lines or iter([self.instructions, STOP])
            return UserMessage(role="user", content=next(self.lines))

    logger.remove()
    registry.register_user(Reader, "reader")
    # tau2 has 10 connections for all threads; answers are lost where connections are fewer (httpcore's issue 1110).
    litellm.client_session = httpx.Client(limits=httpx.Limits())


def serve() -> None:
    """Start the server in a thread."""
    Path(SOCKET).unlink(missing_ok=True)
    ThreadingUnixStreamServer.daemon_threads = True  # an episode that the run's end cuts off keeps no process alive
    threading.Thread(target=ThreadingUnixStreamServer(SOCKET, Episode).serve_forever, daemon=True).start()


def ask(row: dict) -> float:
    """Have the server play a row. Returns the reward."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(SOCKET)
        server.sendall(f"{json.dumps([row, agent.POLICY])}\n".encode())
        return json.loads(server.makefile().read())


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        prepare_tau2()
        serve()
        config = Path(__file__).with_name("tau2_retail_small.yaml")
        sys.exit(subprocess.call([".venv/bin/areal", "run", str(config), *sys.argv[2:]]))
    agent.post(ask(json.loads(sys.stdin.readline())))
