"""One way to break the library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = "tests/cuda/test_kernels.py"


@dataclass(frozen=True)
class Mutant:
    """One way to break something.

    Attributes
    ----------
    file, old, new : str
        `old` occurs in the file exactly once.
    tests : sequence of str
        Arguments for pytest that select what has to fail.
    gpu : bool
        Only a GPU executes what is broken.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = (KERNELS, "-k", "host")
    gpu: bool = False

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        count = text.count(self.old)
        if count != 1:
            raise SystemExit(f"{self.name}: {self.old!r} occurs {count} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))
