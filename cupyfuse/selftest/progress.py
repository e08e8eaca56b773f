"""Progress on standard error: rich's bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """A context manager that reports which of `total` stages is running."""

    def __init__(self, total: int):
        self._total = total
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        # In a file or a pipe a bar would be control characters only.
        if sys.stderr is not None and sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return self
            columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn())
            self._bar = Bar(*columns, TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, cls: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, text: str) -> None:
        """Begin the next stage."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif sys.stderr is not None:
            self._print(f"[{self._done + 1}/{self._total}] {text}")
        self._done += 1

    def _print(self, line: str) -> None:
        """Write a line to standard error, if that can be written."""
        try:
            print(line, file=sys.stderr, flush=True)
        except BrokenPipeError:  # as for `2>&1 | head`: nobody reads the results either
            raise
        except OSError:  # a full disk, a closed descriptor: the results matter more
            return
