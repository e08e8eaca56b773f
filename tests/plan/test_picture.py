"""Pictures of plans and plans as data: well-formed, complete, with the figures of the plan."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse import devices, heads
from cupyfuse.plan import picture
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.report import duration, quantity

SVG = "{http://www.w3.org/2000/svg}"


def plan_of(name: str, bound: bool = False, **options: Any) -> Plan:
    head = heads.find(name)
    specs = {argument: cf.spec(shape) for argument, shape in heads.input_shapes(head).items()}
    x = specs.pop("x")
    return head.bind(**specs).plan(x) if bound else head.plan(x, **specs, **options)


def parsed(plan: Plan, gpu: str = devices.DEFAULT) -> ElementTree.Element:
    return ElementTree.fromstring(plan.svg(gpu))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(root: ElementTree.Element) -> list[tuple[float, str]]:
    """The bars of the steps: their lengths and colours, in order; the legend and the background are left out."""
    found = [e for e in root.iter(f"{SVG}rect") if float(e.get("x", -1)) == picture._BAR]
    return [(float(e.get("width", "nan")), e.get("fill", "")) for e in found][1:]


PLANS = {
    "product": plan_of("logsumexp"),
    "bound": plan_of("softmax", bound=True),
    "training": plan_of("softmax", training=True),
    "no product": plan_of("sum", bound=True),
    "empty": cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((0, 5))),
    "nothing": cf.fuse(lambda x: x).plan(cf.spec((3, 5))),
    "scalar": cf.fuse(lambda x: x + 1).plan(cf.spec(())),
}
each_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


@each_plan
def test_every_step_is_in_the_picture_with_its_cost(plan: Plan) -> None:
    written = "\n".join(texts(parsed(plan)))
    for part in filter(None, (plan, plan.prepare)):
        for step in part.steps:
            assert f"{step.kind} over {step.domain[0]} x {step.domain[1]}" in written
            assert f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}" in written
            assert duration(max(part.step_times(step, devices.find("H200")))) in written
        assert ("nothing to compute" in written) == (not part.steps)
    assert f"fused: {plan.launches} launch" in written and "H200" in written


@each_plan
def test_elements_lie_within_the_picture(plan: Plan) -> None:
    """Texts too, in a font as wide as the widest of those it asks for."""
    root = parsed(plan)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    for element in root.iter(f"{SVG}text"):
        x, y, text = float(element.get("x", -1)), float(element.get("y", -1)), element.text or ""
        length = 0.0 if element.get("text-anchor") == "middle" else 0.61 * 12 * len(text)
        assert 0 <= x <= width - length, text
        assert 0 < y < height, text
    for element in root.iter(f"{SVG}rect"):
        assert float(element.get("x", 0)) + float(element.get("width", "nan")) <= width
        assert float(element.get("y", 0)) + float(element.get("height", "nan")) <= height


def test_bars_are_proportional_to_time() -> None:
    plan, device = PLANS["bound"], devices.find("A100")
    assert plan.prepare is not None
    times = [t for part in (plan, plan.prepare) for step in part.steps for t in part.step_times(step, device)]
    drawn = bars(parsed(plan, "A100"))
    longest = max(times)
    assert [colour for _, colour in drawn] == [picture._MEMORY, picture._ARITHMETIC] * (len(times) // 2)
    for (length, _), seconds in zip(drawn, times, strict=True):
        # A tenth of a pixel, and one pixel at least.
        assert length == pytest.approx(max(1.0, picture._BAR_WIDTH * seconds / longest), abs=0.051)
    assert max(drawn)[0] == picture._BAR_WIDTH


def test_lines_lead_from_writers_to_readers() -> None:
    """The training step: the product is read by the statistics and, around those, by the last step."""
    paths = [p.get("d", "") for p in parsed(PLANS["training"]).iter(f"{SVG}path") if p.get("fill") == "none"]
    assert len(PLANS["training"].steps) == 3
    assert len([p for p in paths if "V" in p]) == 2 and len([p for p in paths if "C" in p]) == 1
    apart = cf.fuse(lambda x, y: (x.sum(axis=1), y.sum(axis=0))).plan(cf.spec((3, 4)), cf.spec((5, 6)))
    assert len(apart.steps) == 2
    assert parsed(apart).find(f"{SVG}path") is None


def test_names_are_escaped() -> None:
    def function(x: Any) -> Any:
        return x + 1

    function.__name__ = '<script>&"\x00\ud800'
    plan = cf.fuse(function).plan(cf.spec((2, 3)))
    assert 'plan of <script>&"\ufffd\ufffd(x' in texts(parsed(plan))[0]
    assert "<script>" not in plan._repr_html_()


def test_many_steps_are_cut_and_counted() -> None:
    def deep(x: Any) -> Any:
        for _ in range(picture._MOST_STEPS):
            x = x - x.mean(axis=0)
        return x

    plan = cf.fuse(deep).plan(cf.spec((400, 300)))
    assert len(plan.steps) > picture._MOST_STEPS
    root = parsed(plan)
    assert len(list(root.iter(f"{SVG}circle"))) == picture._MOST_STEPS
    rest = sum(max(plan.step_times(s, devices.find("H200"))) for s in plan.steps[picture._MOST_STEPS :])
    assert f"… and {len(plan.steps) - picture._MOST_STEPS} more steps, at best {duration(rest)}" in texts(root)


def test_a_plan_in_blocks_of_rows_says_so() -> None:
    fused = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1), max_workspace=1 << 20, precision="ieee")
    plan = fused.plan(cf.spec((4096, 64)), cf.spec((1024, 64)))
    assert plan.blocks is not None
    assert f"the steps run for {plan.blocks.count} blocks of {plan.blocks.rows} rows" in "\n".join(texts(parsed(plan)))
    assert plan.record()["blocks"] == {"count": plan.blocks.count, "rows": plan.blocks.rows, "choice": ""}


def test_an_unknown_gpu_is_refused() -> None:
    for describe in (PLANS["scalar"].svg, PLANS["scalar"].record):
        with pytest.raises(ValueError, match="gpu: expected one of H200"):
            describe("TPU")


@each_plan
def test_a_notebook_shows_the_picture_and_the_text(plan: Plan) -> None:
    shown = plan._repr_html_()
    assert plan.svg() in shown
    root = ElementTree.fromstring(f"<body>{shown}</body>")
    assert [e.text for e in root.iter("pre")] == [str(plan)]


@each_plan
def test_the_record_has_the_figures_of_the_plan(plan: Plan) -> None:
    record = json.loads(json.dumps(plan.record("H100"), allow_nan=False))
    for name in ("name", "precision", "launches", "reads", "writes", "flops", "workspace"):
        assert record[name] == getattr(plan, name)
    assert record["gpu"] == "H100" and record["best_seconds"] == plan.best_time("H100")
    assert [s["kind"] for s in record["steps"]] == [s.kind for s in plan.steps]
    assert sum(s["best_seconds"] for s in record["steps"]) == pytest.approx(record["best_seconds"])
    assert [a["shape"] for a in record["arguments"]] == [list(n.shape) for n in plan.graph.inputs if n.name]
    assert [r["shape"] for r in record["results"]] == [list(o.shape) for o in plan.outputs]
    assert (record["prepacked"] is None) == (plan.prepare is None)
    if plan.prepare is not None:
        assert record["prepacked"]["writes"] == plan.prepare.writes
    assert sum(note["times"] for note in record["rewritten"]) == len(plan.notes)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (1.5e-9, "1.5 ns"), (7e-6, "7 us"), (999.6e-6, "1 ms"), (0.25, "250 ms"), (3.0, "3 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quantities_are_rounded_before_their_prefix_is_chosen() -> None:
    assert [quantity(n, "B") for n in (0, 999, 999.6, 999_400, 999_600, 2**30)] == [
        "0 B",
        "999 B",
        "1 kB",
        "999 kB",
        "1 MB",
        "1.07 GB",
    ]


def test_the_record_counts_what_runs() -> None:
    """Against figures by hand: a row-wise softmax reads and writes its 2 x 3 float32 values once."""
    record = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((2, 3))).record()
    (step,) = record["steps"]
    assert (step["reads"], step["writes"], step["launches"], step["domain"]) == (24, 24, 1, [2, 3])
    assert record["results"] == [{"shape": [2, 3], "dtype": "float32"}]
    assert np.isclose(step["best_seconds"], 48 / 4.8e12)
    assert record["name"] == "<lambda>"
