"""The log on stderr: lines of text for people, or one JSON object a line for machines."""

import json
import logging
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from types import TracebackType
from typing import Final, Literal

from dataserver.process import escaped

LogFormat = Literal["text", "json"]

_TEXT: Final = logging.Formatter("%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
_log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, process, message, and exception where there is one.

    ASCII only: whatever a message holds, a line is one line of valid JSON.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": escaped(record.getMessage()),
        }
        if record.exc_info:
            found["exception"] = escaped(self.formatException(record.exc_info))
        return json.dumps(found)


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # cannot be subscripted at run time
    """Tells the log that `start` made from those of others."""


def start(arguments: Sequence[str]) -> None:
    """Begin to log, as the flag --log-format among the arguments of a command says, from the first line on."""
    handler = _Handler()
    handler.setFormatter(_TEXT)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # It logs a traceback of each message that is none, and whoever called learns of it all the same.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    words = [word for argument in arguments for word in argument.split("=", 1)]
    if ("--log-format", "json") in pairwise(words):
        use("json")


def use(log_format: LogFormat) -> None:
    """Log in another form from here on; as JSON also exceptions that nobody caught, and warnings."""
    for handler in _handlers():
        handler.setFormatter(_TEXT if log_format == "text" else JsonFormatter())
    if log_format == "json" and _handlers():
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_of_thread


def writes_json() -> bool:
    """Whether what a command says on stderr must be a log entry as well."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in _handlers())


def _handlers() -> list[_Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _log.critical("ended by an exception", exc_info=(kind, error, traceback))


def _log_uncaught_of_thread(arguments: threading.ExceptHookArgs) -> None:
    name = "(ended)" if arguments.thread is None else arguments.thread.name
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        error = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        _log.critical("thread %s ended by an exception", name, exc_info=error)
