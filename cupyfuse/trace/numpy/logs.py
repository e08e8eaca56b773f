"""Messages of loggers during a trace: of traced values they show what `print` shows, whatever their formats say."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..value import TracedValue

_NUMBER = re.compile(r"%(\(.*?\))?[-#0 +]*\d*(?:\.\d*)?[hlL]?[diouxXeEfFgG]|%%")


def _with_texts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Logger.makeRecord`, whose records hold the text of messages with traced arguments."""

    @wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        """Make a record; if an argument is traced, all formats of numbers in the message are `%s`."""
        record = original(self, *args, **options)
        values = record.args.values() if isinstance(record.args, dict) else record.args or ()
        if any(isinstance(value, TracedValue) for value in values):
            form = _NUMBER.sub(lambda found: found[0] if found[0] == "%%" else f"%{found[1] or ''}s", str(record.msg))
            record.msg, record.args = form % record.args, ()
        return record

    return call


REPLACED = (logging.Logger, "makeRecord", _with_texts(logging.Logger.makeRecord))
