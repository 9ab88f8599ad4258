"""Lines that long-running commands print: with their time and level, and to a rotating file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from fedskew.core.settings import UsageError
from fedskew.core.text import clean

Say = Callable[[str], None]  # prints one line
LARGEST, KEPT = 10 << 20, 5  # bytes of a log file, and how many old ones are kept
LONGEST = 2000  # characters of a line


def printer(stream: IO[str], file: Path | None = None, prefix: str = "") -> Say:
    """A function that prints one line: time (UTC), level, `prefix` and the text, to a stream and to `file`.

    Text that starts with "warning: " has the level WARNING. Whatever a peer put into the text cannot start a new line
    or move the cursor.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(stream)]
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(RotatingFileHandler(file, maxBytes=LARGEST, backupCount=KEPT))
        except OSError as error:
            raise UsageError(f"--log-file {file} cannot be written: {error.strerror}.") from None
    form = logging.Formatter("%(asctime)sZ %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")
    form.converter = time.gmtime
    for handler in handlers:
        handler.setFormatter(form)

    def say(text: str) -> None:
        warned = text.startswith("warning: ")
        level = logging.WARNING if warned else logging.INFO
        line = clean(prefix + text.removeprefix("warning: "), LONGEST)
        record = logging.LogRecord("fedskew", level, "", 0, line, None, None)
        for handler in handlers:
            handler.handle(record)

    return say
