"""Structured logs: a JSON object per line on standard error, with the request's id. Prompts only with `log.prompts`."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any

from keepwarm.serving.settings import LogSection

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("keepwarm_request_id", default="")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """A record as JSON; what was given as `extra` stands beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := request_id.get():
            line["request_id"] = found
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """A record as a line of text for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        more = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in _STANDARD)
        return f"{super().format(record)} {more}".rstrip()


def set_up(section: LogSection) -> None:
    """Send our records and uvicorn's to standard error, in one form. Changes the process's loggers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if section.format == "json" else TextLines())
    for name in ("keepwarm", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler] if name != "uvicorn.error" else []
        logger.setLevel(section.level.upper())
        logger.propagate = name == "uvicorn.error"
