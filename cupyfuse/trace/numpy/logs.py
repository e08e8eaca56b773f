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
            try:
                record.msg, record.args = form % record.args, ()
            except (TypeError, ValueError, KeyError):  # which handlers report, and do not raise
                record.msg, record.args = form, _shown(record.args)
        return record

    return call


def _shown(args: Any) -> Any:
    """Return the arguments of a message with texts for those that are traced."""
    if isinstance(args, dict):
        return {name: _shown((value,))[0] for name, value in args.items()}
    return tuple(str(value) if isinstance(value, TracedValue) else value for value in args)


REPLACED = (logging.Logger, "makeRecord", _with_texts(logging.Logger.makeRecord))
