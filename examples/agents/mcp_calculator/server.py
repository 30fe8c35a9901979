"""An MCP server with a calculator."""

from __future__ import annotations

import operator
import re
import sys

from mcp.server import MCPServer

server = MCPServer("calculator")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@server.tool()
def calculate(expression: str) -> str:
    """Return the value of an expression of two integers, for example 12*7."""
    parts = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", expression)
    if parts is None:
        return "error: not an expression of two integers"
    left, name, right = parts.groups()
    return str(OPERATORS[name](int(left), int(right)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    server.run()
