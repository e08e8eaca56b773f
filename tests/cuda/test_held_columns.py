"""Values of columns that stay in shared memory from row to row, where the teams of a block share them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forced_rows import check_in_orders, force, program_of
from kernel_cases import Case, affine_softmax, layer_norm, normalised

import cupyfuse as cf
from cupyfuse.cuda.config import Access, Config, accesses
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.program import Program
from cupyfuse.cuda.shared_rows import held_bytes
from cupyfuse.cuda.sources import emit_kernels
from cupyfuse.engines import kernel_launch

# One team or several, of a warp or of more, of one block or of those of a cluster; a thread has one pack, or several.
CONFIGURATIONS = [
    Config("row_shared", 64, 2, 8, packs=2, rows=2, columns=True),
    Config("row_shared", 256, 1, 4, packs=1, rows=4, columns=True),
    Config("row_shared", 64, 4, 2, packs=4, rows=2, columns=True),
    Config("row_shared", 64, 3, 2, cluster=2, packs=3, columns=True),
    Config("row_shared", 96, 1, 8, cluster=2, packs=1, rows=3, columns=True),
    Config("row_shared", 128, 2, 4, cluster=3, packs=2, rows=2, columns=True),
]


def name_of(config: Config) -> str:
    return f"{config.threads}x{config.vec}-{config.cluster}blocks-{config.rows}rows"


def chosen(function: Any, shape: tuple[int, int], dtype: str, vectors: int = 2) -> tuple[Program, Config]:
    arrays = cf.spec(shape, dtype), *[cf.spec(shape[1], dtype)] * vectors
    program = program_of(function, *arrays)
    return program, default_config(program, next(accesses(program)), clusters=True)


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 256), (9, 256), (5, 251), (19, 254)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("program", [affine_softmax, layer_norm])
def test_teams_share_values_of_columns(
    monkeypatch: pytest.MonkeyPatch, config: Config, shape: tuple[int, int], program: Any
) -> None:
    """Some teams have several rows, some none; values are read in each stage, or in the last one."""
    monkeypatch.setattr(kernel_launch, "_teams", lambda config, rows, at_once: min(rows, 8))
    force(monkeypatch, config, shape[1])
    dtype = "float16" if config.vec == 8 else "float32"
    for special in (False, True):
        check_in_orders(Case(program, shape, dtype, special=special))


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name_of)
def test_a_program_without_values_of_columns_has_teams_too(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    force(monkeypatch, config, 251)
    check_in_orders(Case(normalised, (7, 251), "float16" if config.vec == 8 else "float32"))


@pytest.mark.parametrize("vec", [2, 4, 8])
@pytest.mark.parametrize("at_once", [1, 7, 15, 62, 132, 264])
@pytest.mark.parametrize("cluster", [1, 3, 8, 16])
def test_all_rows_of_a_cluster_begin_at_the_same_place_in_a_pack(vec: int, at_once: int, cluster: int) -> None:
    """Each has a cluster, none of which computes rows for which it does not hold values of columns."""
    for rows in (1, 2, vec - 1, vec, vec + 1, 63, 100, 1000, 10_007, 1 << 20):
        for at_a_time, blocks in [(1, 8), (4, 2), (8, 1)]:
            config = Config(
                "row_shared", 512, 1, vec, 32, 1, blocks, cluster, 1, shifted=True, rows=at_a_time, columns=True
            )
            (grid,) = kernel_launch._grids(config, rows, 4099, at_once)
            clusters, rest = divmod(grid[0], cluster)
            assert rest == 0
            assert 1 <= clusters <= max(rows, vec)
            assert clusters >= rows or clusters % vec == 0
            assert clusters >= min(rows, at_once // vec * vec)
            if cluster > 1 and at_once % vec == 0:
                assert clusters <= at_once or clusters == rows  # another one would wait for whole multiprocessors


def test_a_cluster_that_has_its_multiprocessors_to_itself_computes_many_rows() -> None:
    """Others have a row each, so that one may begin while another ends."""
    for blocks, expected in [(1, 7), (2, 341)]:
        config = Config("row_shared", 512, 4, 4, blocks=blocks, cluster=16, packs=4)
        assert kernel_launch._grids(config, 341, 1 << 18, 7) == [(expected * 16, 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cols", [2049, 8191, 50257])
def test_rows_of_odd_lengths_hold_values_of_columns(dtype: str, cols: int) -> None:
    """If they are many: vectors of columns, which lie in two, are put together once for many rows."""
    for function in (affine_softmax, layer_norm):
        _, config = chosen(function, (4096, cols), dtype)
        reads_once = function is layer_norm and dtype == "float32" and cols < 16384  # rows in registers are as fast
        assert config.columns != reads_once
        _, few = chosen(function, (100, cols), dtype)
        assert not few.columns


def test_what_is_better_computed_from_registers_holds_none() -> None:
    """Rows that begin at vectors, float64, much to compute again, GPUs without clusters, and rows read elsewhere."""

    def of_silu(y: Any, a: Any, c: Any) -> Any:
        return layer_norm(cf.silu(y), a, c)

    assert chosen(layer_norm, (4096, 8191), "bfloat16")[1].columns
    assert not chosen(layer_norm, (4096, 8192), "bfloat16")[1].columns
    assert not chosen(layer_norm, (4096, 8191), "float64")[1].columns
    assert not chosen(of_silu, (4096, 8191), "bfloat16")[1].columns
    program, _ = chosen(layer_norm, (4096, 8191), "bfloat16")
    assert not default_config(program, Access(8, True), clusters=False).columns
    assert not default_config(program, Access(8, True, True), clusters=True).columns


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vectors", [1, 2])
def test_blocks_fit_a_multiprocessor(dtype: str, vectors: int) -> None:
    """Their shared memory, threads and barriers: all 16 of a block with several teams, of 64."""

    def shifted_softmax(y: Any, a: Any) -> Any:
        return cf.softmax(y + a, axis=1)

    function = affine_softmax if vectors == 2 else shifted_softmax
    held = 0
    for cols in (1025, 1999, 4099, 12289, 16385, 24577, 32768, 65536, 100352, 151937, 262144):
        program, config = chosen(function, (8192, cols), dtype, vectors)
        if not config.columns:
            continue
        held += 1
        (kernel,) = emit_kernels(program, config)
        elements = config.threads // config.rows * config.packs * config.vec
        assert kernel.shared == held_bytes(program, elements, config.rows, columns=True)
        assert kernel.shared >= elements * np.dtype("u2" if dtype == "bfloat16" else "f4").itemsize * (
            config.rows + vectors
        )
        assert elements * config.cluster >= cols
        assert config.blocks * (kernel.shared + 1024) <= 228 << 10
        assert config.blocks * config.threads <= 1024
        assert config.rows == 1 or config.blocks <= 4
        assert kernel.cluster == config.cluster <= 16
    assert held >= 5
