"""The log: a line of JSON for each request that has ended, with lengths and times, never a prompt or an answer.

It goes to the standard output; the standard error is for what went wrong.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime


class JsonLines(logging.Formatter):
    """`{"time", "event", ...}`; what stands in the record's `fields`, beside what it says."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": when, "event": record.getMessage(), **vars(record).get("fields", {})})


def set_up() -> None:
    """Once in a process, before anything is served."""
    requests = logging.getLogger("kvscope")
    requests.setLevel(logging.INFO)
    requests.propagate = False
    lines = logging.StreamHandler(sys.stdout)
    lines.setFormatter(JsonLines())
    requests.addHandler(lines)
    others = logging.StreamHandler()
    others.addFilter(_quotes_nobody)
    logging.getLogger().addHandler(others)


def _quotes_nobody(record: logging.LogRecord) -> bool:
    """MCP's warnings repeat what a client sent."""
    return record.levelno >= logging.ERROR or f"{os.sep}mcp{os.sep}" not in record.pathname
