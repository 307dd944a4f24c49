"""An MCP server with a single tool, on standard streams or, with a port, by streamable HTTP."""

import sys

from mcp.server.mcpserver import MCPServer

PRICES = {"apple": 3, "pear": 4, "plum": 2, "melon": 9, "lemon": 5, "cherry": 1}
server = MCPServer("shop", log_level="ERROR")


@server.tool()
def price(fruit: str) -> str:
    """The price of a fruit, for example "apple"."""
    cost = PRICES.get(fruit.lower().strip())
    return f"There is no {fruit}." if cost is None else f"One {fruit} costs {cost}."


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
