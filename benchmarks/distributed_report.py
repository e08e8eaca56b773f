"""The report of the heads trained on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .report import number, scientific, table

PLAIN, BACKEND, DROP_IN = "PyTorch", "torch.compile(backend=cupyfuse)", "drop-in module"
INSIDE, OUTSIDE = "wrapped after fuse", "fused after wrapping"
FORMS = (PLAIN, OUTSIDE, INSIDE, DROP_IN, BACKEND)
WRAPPERS = ("DDP", "fully_shard")
DTYPES = ("float32", "bfloat16")
STEPS = 5  # of which losses are compared


_HOW = """\
Each row trains a head for five steps of SGD with momentum, every process on data of its own, then is timed with a fused
AdamW. *error* is the largest difference of a step's loss to the same training in float64, relative to the loss;
*PyTorch's* is that of the plain model in the same dtype. *to PyTorch* compares with that model's losses; *parameters*
compares its parameters after the steps with ours, relative to how far they have moved. *ms* is the time of a step in
the slowest process. A row is *right* where its error is at most four times PyTorch's, or a rounding."""


@dataclass
class Row:
    """What one form of a model did.

    Attributes
    ----------
    head, dtype, wrapper, form : str
    failure : str
        Why there are no figures.
    error, plain_error : float or None
        The largest difference of a step's loss to training in float64, relative to that loss; PyTorch's.
    difference : float or None
        The same to PyTorch's training in the same dtype.
    parameters : float or None
        ‖parameters − PyTorch's‖ / ‖those − the first ones‖, after the steps.
    milliseconds : float or None
        Of a step, the slowest process's; the median of three runs.
    chains : int or None
        How many ran; None where nothing tells.
    """

    head: str
    dtype: str
    wrapper: str
    form: str
    failure: str = ""
    error: float | None = None
    plain_error: float | None = None
    difference: float | None = None
    parameters: float | None = None
    milliseconds: float | None = None
    chains: int | None = None

    @property
    def right(self) -> bool:
        """Whether it trained as PyTorch alone does: as near to float64, within a few times."""
        if self.failure or self.error is None or self.plain_error is None:
            return False
        return self.error <= 4 * self.plain_error + (2**-7 if self.dtype == "bfloat16" else 1e-5)


@dataclass
class Table:
    """All rows, and what they were measured with."""

    environment: dict[str, Any]
    options: dict[str, Any]
    rows: list[Row] = field(default_factory=list)


def planned(heads: Sequence[str], dtypes: Sequence[str], forms: Sequence[str]) -> list[Row]:
    """The rows in the order in which they are run: what compiles for long is last."""
    quick = [form for form in FORMS if form in forms and form != BACKEND]
    slow = [form for form in forms if form == BACKEND]
    cases = [(dtype, wrapper, head) for dtype in dtypes for wrapper in WRAPPERS for head in heads]
    return [
        Row(head, dtype, wrapper, form) for part in (quick, slow) for dtype, wrapper, head in cases for form in part
    ]


def distributed_markdown(found: Table) -> str:
    """A table a dtype and wrapper."""
    about = ", ".join(f"{name} {value}" for name, value in found.environment.items() if value is not None)
    stated = ", ".join(f"{name} {value}" for name, value in found.options.items())
    lines = ["# Training on several GPUs", "", f"{about}.", "", f"{stated}.", "", *_HOW.splitlines(), ""]
    for key in dict.fromkeys((row.dtype, row.wrapper) for row in found.rows):
        rows = [row for row in found.rows if (row.dtype, row.wrapper) == key]
        lines += [f"## {key[0]}, {key[1]}", ""]
        header = ["head", "how", "right", "error", "PyTorch's", "to PyTorch", "parameters", "ms", "chains"]
        lines += [*table(header, [_cells(row) for row in sorted(rows, key=lambda row: row.head)]), ""]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    if row.failure:
        return [row.head, row.form, row.failure, "", "", "", "", "", ""]
    chains = "" if row.chains is None else str(row.chains)
    figures = [scientific(value) for value in (row.error, row.plain_error, row.difference, row.parameters)]
    return [row.head, row.form, "yes" if row.right else "NO", *figures, number(row.milliseconds), chains]
