"""What a template asks of the struct that is emitted for it: how rows are read, and where their values are held."""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config

_STREAMED = ("row_stream", "row_shares", "row_shared")


@dataclass(frozen=True)
class Form:
    """The form of a program's struct, whose members `kernels_cu/row_block.cu` describes.

    Attributes
    ----------
    conditional : bool
        Whether the struct ends with a flag, see `translation_unit`.
    recomputed : bool
        Whether each stage computes what it needs of earlier ones again, from the row as it was loaded.
    packed : bool
        Whether rows stay in registers as they were loaded.
    shifted : bool
        Whether rows may begin between two packs.
    apart : bool
        Whether rows that are read may begin elsewhere in a pack than those that are written.
    shared : bool
        Whether rows are held in shared memory as they were loaded.
    merges : bool
        Whether a second kernel merges the totals that blocks leave.
    in_lanes : bool
        Whether the lanes of a warp have rows in registers: those that hold values know the maximum of a row before
        they add up what is relative to it.
    columns : bool
        Whether values of columns are held in shared memory from row to row.
    in_turn : bool
        Whether a thread has one row after the other in registers, and adds up columns over them.
    evict_last : bool
        Whether the L2 cache evicts rows that are read after those that are written.
    """

    conditional: bool = False
    recomputed: bool = False
    packed: bool = False
    shifted: bool = False
    apart: bool = False
    shared: bool = False
    merges: bool = False
    in_lanes: bool = False
    columns: bool = False
    in_turn: bool = False
    evict_last: bool = False

    @classmethod
    def of(cls, config: Config, conditional: bool = False) -> Form:
        """Return the form of a configuration's template."""
        return cls(
            conditional=conditional,
            recomputed=config.packed or config.template in _STREAMED,
            packed=config.packed,
            shifted=config.shifted,
            apart=config.apart,
            shared=config.packs > 0,
            merges=config.merges,
            in_lanes=config.template == "row_lanes",
            columns=config.columns,
            in_turn=config.template == "row_columns",
            evict_last=config.evict_last,
        )

    @property
    def one_tile(self) -> bool:
        """Whether all stages have one tile, of what any of them reads."""
        return self.packed or self.in_lanes or self.in_turn

    @property
    def holds_terms(self) -> bool:
        """Whether elements hold the terms of sums of exponentials."""
        return self.in_lanes and not self.recomputed
