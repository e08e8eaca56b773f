"""The command line: `python -m cupyfuse demo`, `selftest`, `info` and `explain`."""

from .commands import main

__all__ = ["main"]
