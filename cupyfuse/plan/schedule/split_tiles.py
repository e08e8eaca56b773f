"""The tiles of hi/lo split products by our own kernel (`kernels_cu/split_gemm.cu`)."""

from __future__ import annotations

# Tiles of a split product: rows, and the available widths.
TILE_ROWS, TILE_WIDTHS = 128, (168, 160, 144, 128, 96, 64)
_FIXED_WIDTH = 28  # cost of a tile beside its products, in columns


def tile_columns(rows: int, cols: int, width: int, processors: int) -> int:
    """Count the columns that each multiprocessor computes in all its tiles, `_FIXED_WIDTH` for each tile included."""
    tiles = -(-rows // TILE_ROWS) * -(-cols // width)
    return -(-tiles // processors) * (_FIXED_WIDTH + width)


def tile_width(rows: int, cols: int, processors: int) -> int:
    """Choose the tile width with which a product takes the least time on so many multiprocessors."""
    return min(TILE_WIDTHS, key=lambda width: tile_columns(rows, cols, width, processors))
