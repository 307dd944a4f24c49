"""An MCP server with a single tool, on standard streams or, with a port, by streamable HTTP.

server.py PORT ARGUMENTS... serves while a Python of these arguments runs.
"""

import socket
import subprocess
import sys
import threading
import time

from mcp.server.mcpserver import MCPServer

PRICES = {"apple": 3, "pear": 4, "plum": 2, "melon": 9, "lemon": 5, "cherry": 1}
server = MCPServer("shop", log_level="ERROR")


@server.tool()
def price(fruit: str) -> str:
    """The price of a fruit, for example "apple"."""
    cost = PRICES.get(fruit.lower().strip())
    return f"There is no {fruit}." if cost is None else f"One {fruit} costs {cost}."


def serve_during(port: int, arguments: list[str]) -> int:
    """Serve while a Python of these arguments runs. Returns its exit code."""
    serving = threading.Thread(target=server.run, args=["streamable-http"], kwargs={"port": port}, daemon=True)
    serving.start()
    while serving.is_alive() and socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    return subprocess.call([sys.executable, *arguments]) if serving.is_alive() else 1


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            server.run()
        case [port]:
            server.run("streamable-http", port=int(port))
        case [port, *arguments]:
            sys.exit(serve_during(int(port), arguments))
