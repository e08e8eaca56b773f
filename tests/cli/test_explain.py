"""`explain`: plans of the heads and of any function of a module, as text, JSON, picture and CUDA; what it refuses."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

import cupyfuse as cf
from cupyfuse import heads
from cupyfuse.cli import commands as cli

TINY = ["--rows", "8", "--in-features", "12", "--out-features", "20"]
MODULE = """
import sys
import numpy as np
import cupyfuse as cf

@cf.fuse
def head(x, weight, axis=1):
    return cf.softmax(x @ weight.T, axis=axis)

def plain(x, y=None):
    y = x if y is None else y
    return np.exp(x) + y

def scaled(x, by):
    return x * by

def branches(x):
    if x.sum() > 0:
        return x
    return -x

def fails(x):
    return x / {}["missing"]

def shapes(x, y):
    return x @ y

def stacked(*arrays):
    return np.stack(arrays)

class Model:
    @cf.fuse
    def forward(self, x):
        return x + 1

serve = head.bind(weight=np.ones((5, 4), np.float32))
number = 3
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `mine` in the current folder, and others that cannot be imported."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken.py").write_text("import numpy\nraise KeyError('no data')\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "lacking.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("mine", "broken", "exits", "lacking"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["explain", *arguments]) == 0
    return capsys.readouterr().out


# The heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*heads.HEADS, "sum"])
def test_a_head(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, name, *TINY)
    assert text.startswith(f"plan of {heads.find(name).__name__}(x 8 x 12 float32, weight 20 x 12 float32")
    assert "at best" in text


def test_a_head_of_the_benchmarks_shape_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(x 1024 x 8192 float32, weight 8192 x 8192 float32" in printed(capsys, "head_sum")


def test_bound_and_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prepacked once" in printed(capsys, "head_sum", *TINY, "--bound")
    text = printed(capsys, "head_softmax", *TINY, "--training", "--dtype", "bfloat16")
    assert "ColumnStats" in text and "bfloat16" in text


@pytest.mark.parametrize("more", [[], ["--bound"]])
def test_source_is_cuda(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "head_sum", *TINY, "--source", *more)
    assert "struct" in text
    assert ("Run once" in text) == bool(more)


def test_specs_and_values_replace_the_arguments_of_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "head_sum", *TINY, "--spec", "x=7x12:float16")
    assert "(x 7 x 12 float16, weight 20 x 12 float32" in text


# Functions of modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        (["mine:head", "--spec", "x=3x4:float32", "--spec", "weight=5x4"], "x 3 x 4 float32, weight 5 x 4 float32"),
        (["mine:plain", "--spec", "x=3x4:float64"], "x 3 x 4 float64"),
        (["mine:plain", "--spec", "x=3,4:bfloat16", "--spec", "y=4"], "x 3 x 4 bfloat16, y 1 x 4 float32"),
        (["mine:scaled", "--spec", "x=scalar:float16", "--value", "by=2.5"], "x 1 x 1 float16"),
        (["mine:scaled", "--spec", "x=0x4", "--spec", "by=scalar"], "x 0 x 4 float32, by 1 x 1 float32"),
        (["mine:Model.forward", "--spec", "x=3x4", "--value", "self=None"], "x 3 x 4 float32"),
        (["mine:serve", "--spec", "x=3x4"], "x 3 x 4 float32"),
        (["cupyfuse:softmax", "--spec", "x=3x4", "--value", "axis=0"], "x 3 x 4 float32"),
        (["mine:head", "--spec", "x=3x4", "--spec", "weight=5x4", "--bound"], "x 3 x 4 float32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_function(arguments: list[str], inputs: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *arguments)
    name = arguments[0].partition(":")[2].rpartition(".")[2]
    assert text.startswith(f"plan of {'head' if name == 'serve' else name}({inputs}")
    assert "at best" in text


def test_a_value_decides_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    by_rows, by_columns = (
        printed(capsys, "mine:head", "--spec", "x=3x4", "--spec", "weight=5x4", "--value", f"axis={axis}")
        for axis in (1, 0)
    )
    assert "ColumnStats" in by_columns and "ColumnStats" not in by_rows


def test_json_is_the_record_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["--spec", "x=3x4:float32", "--spec", "weight=5x4"]
    record = json.loads(printed(capsys, "mine:head", *specs, "--json"))
    expected = cf.fuse(lambda x, weight: cf.softmax(x @ weight.T, axis=1)).plan(cf.spec((3, 4)), cf.spec((5, 4)))
    assert record == {**expected.record(), "name": "head"}
    assert json.loads(printed(capsys, "mine:head", *specs, "--json", "--bound"))["prepacked"] is None
    assert json.loads(printed(capsys, "head_sum", *TINY, "--json", "--bound"))["prepacked"]["launches"] > 0


def test_svg_is_the_picture_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "mine:plain", "--spec", "x=3x4", "--svg")
    plan = cf.fuse(lambda x: x).plan(cf.spec((3, 4)))
    assert text.startswith("<svg") and text.endswith("</svg>\n")
    assert "plan of plain(x 3 x 4 float32)" in text and plan.svg().splitlines()[-1] in text


# What is refused ----------------------------------------------------------------------------------------------------

X = ["--spec", "x=3x4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine:"], "argument FUNCTION: expected module:function, got 'mine:'"),
        (["nowhere:head"], "argument FUNCTION: module 'nowhere' cannot be imported: No module named 'nowhere'"),
        (["lacking:head"], "module 'lacking' cannot be imported: No module named 'a_library_that_is_not_there'"),
        (["broken:head"], "importing module 'broken' failed: KeyError: 'no data'"),
        (["exits:head"], "importing module 'exits' failed: SystemExit: 0"),
        ([".mine:head"], "importing module '.mine' failed: TypeError"),
        (["mine:haed"], "'mine' has no 'haed'; it has head, serve"),
        (["mine:Model.backward"], "'Model' has no 'backward'; it has forward"),
        (["mine:number"], "expected a function, but 'mine:number' is of type int"),
        (["mine:number.real.deep"], "'int' has no 'deep'"),
        (["mine:head", "--spec", "x"], "argument --spec: expected NAME=SHAPE:DTYPE, for example x=1024x8192:float32"),
        (["mine:head", "--spec", "x=3x:float32"], "or scalar, as SHAPE), got 'x=3x:float32'"),
        (["mine:head", "--spec", "x=-3"], "or scalar, as SHAPE), got 'x=-3'"),
        (["mine:head", "--spec", "x=3:float31"], "as DTYPE, got 'float31' in 'x=3:float31'"),
        (["mine:head", "--spec", "x=3:"], "as DTYPE, got '' in 'x=3:'"),
        (["mine:head", *X], "argument --spec: head also needs weight: add --spec weight=SHAPE:DTYPE"),
        (["mine:head", *X, "--spec", "w=5x4"], "expected one of x, weight, axis, the parameters of head, got 'w'"),
        (["mine:stacked", *X], "argument --spec: expected no argument by name of stacked, got 'x'"),
        (["mine:head", "--spec", "x=3:float31"], "expected one of bool, int64, float16"),
        (["mine:head", *X, *X], "argument --spec: 'x' was given twice"),
        (["mine:head", *X, "--value", "x=1"], "argument --value: 'x' was given twice"),
        (
            ["mine:head", *X, "--value", "axis"],
            "argument --value: expected NAME=LITERAL, for example axis=1, got 'axis'",
        ),
        (["mine:head", *X, "--value", "axis=one"], "expected a literal of Python after axis=, such as 0.5"),
        (
            ["mine:head", *X, "--rows", "5"],
            "argument --rows: it is for the heads; give the arrays of mine:head by --spec",
        ),
        (["mine:head", *X, "--dtype", "float16"], "argument --dtype: it is for the heads"),
        (["head_sum", "--json", "--svg"], "not allowed with argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_functions_of_numbers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "mine:scaled", "--value", "x=1", "--value", "by=1"]) == 0
    assert "nothing to compute" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mine:branches", *X], "if x.sum() > 0:"),
        (["mine:fails", *X], "mine:fails: KeyError: 'missing'\n  at "),
        (["mine:fails", *X], 'return x / {}["missing"]'),
        (["mine:shapes", *X, "--spec", "y=3x4"], "mine.py:"),
        (["mine:shapes", *X, "--value", "y=None"], "return x @ y"),
    ],
)
def test_functions_that_cannot_be_planned(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cupyfuse: explain: ") and err.count(said) == 1
    assert "Traceback" not in err
