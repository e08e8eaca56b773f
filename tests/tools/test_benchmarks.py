"""The benchmarks without a GPU: statistics, turns, reports and the command line; the cases themselves run on NumPy."""

import importlib.util
import json
import math
import sys
import types

import numpy as np
import pytest
import scipy.special
from benchmark_lab import ENVIRONMENT, FakeCupy, FakeDevice
from benchmarks.cases import WRONG, Rival, Unavailable, errors_of, laboratory, run

from benchmarks import __main__ as command
from benchmarks import charts, environment, families, gemm, heads, rows, tails, timing
from benchmarks.device import GRAPH_CALLS, Device
from benchmarks.report import Case, Report, Result, heads_markdown, number, rows_markdown, table
from benchmarks.verdicts import gemm_markdown, judge, margin
from cupyfuse.settings import PRECISIONS


def measured(*medians, rival="cupyfuse", figure="gpu_evicted"):
    return Result(rival, 1e-7, {figure: timing.summarize(medians)})


# Statistics and turns -----------------------------------------------------------------------------------------------


def test_summary_of_known_numbers():
    summary = timing.summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert summary == timing.Summary(5, 3.0, 1.0, 5.0, 2.0, 4.0)
    assert timing.summarize([7.0]) == timing.Summary(1, 7.0, 7.0, 7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="samples"):
        timing.summarize([])


@pytest.mark.parametrize(("turns", "count"), [(50, 7), (7, 7), (20, 1), (50, 49)])
def test_each_rival_gets_its_count_of_turns(turns, count):
    taken = [turn for turn in range(turns) if timing.due(turn, turns, count)]
    assert len(taken) == count
    gaps = np.diff([-1, *taken])
    assert gaps.max() - gaps.min() <= 1  # spread evenly


def test_bounded():
    assert [timing.bounded(w, 5, 50) for w in (0.0, 7.9, 1e9, math.inf, math.nan)] == [5, 7, 50, 50, 50]


def test_errors_are_described_in_one_short_line():
    assert timing.describe(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert timing.describe(KeyError()) == "KeyError"
    assert len(timing.describe(RuntimeError("x" * 1000))) == 240


def test_a_contest_goes_in_turns_and_drops_who_fails():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": lambda: 1 / 0}
    contest = timing.Contest(FakeDevice(), calls, budget=1e-9)
    order.clear()
    found = contest.evicted()
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert {name: summary.n for name, summary in found.items()} == {"a": 7, "b": 7}
    assert contest.failures == {"c": "ZeroDivisionError: division by zero"}


def test_a_rival_that_fails_later_is_out_and_says_why():
    calls = iter(range(8))
    contest = timing.Contest(FakeDevice(), {"a": lambda: next(calls)}, budget=1e-9)
    assert contest.evicted() == {}
    assert "StopIteration" in contest.failures["a"]
    assert contest.host() == contest.back_to_back() == {}


def test_failed_replays_leave_the_contest_alone():
    contest = timing.Contest(FakeDevice(), {"a": lambda: None, "b": lambda: None}, budget=1e-9)
    taken, failed = contest.replayed({"a": lambda: None, "b": lambda: 1 / 0})
    assert list(taken) == ["a"]
    assert failed == {"b": "ZeroDivisionError: division by zero"}
    assert contest.failures == {}


class FakeStream:
    """A stream that writes down what is asked of it."""

    ptr = 7

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *error):
        self.log.append("exit")

    def synchronize(self):
        self.log.append("synchronize")

    def begin_capture(self):
        self.log.append("begin")

    def end_capture(self):
        self.log.append("end")
        return types.SimpleNamespace(launch=lambda: self.log.append("launch"))


@pytest.fixture
def fake_gpu(monkeypatch):
    """CuPy with a GPU that does nothing but write a log; CuPy's module, with the log as `log`."""
    log = []
    cupy = FakeCupy("cupy")
    memory = types.SimpleNamespace(memset_async=lambda value, size: log.append(("memset", size)))
    scratch = types.SimpleNamespace(data=memory, nbytes=120)
    cupy.log = log
    cupy.__version__ = "14.2.0"
    cupy.empty = lambda shape, dtype=None: scratch if shape == 120 else np.empty(shape, dtype)
    cupy.RawKernel = lambda source, name: lambda grid, block, values: log.append((name, int(values[0])))
    cupy.cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Event=lambda: types.SimpleNamespace(record=lambda: log.append("record"), synchronize=lambda: None),
        Stream=lambda non_blocking: FakeStream(log),
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
        get_elapsed_time=lambda start, end: 0.25,
        get_local_runtime_version=lambda: 13000,
        runtime=types.SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=lambda number: {"name": b"Fake GPU 9000", "l2CacheSize": 60},
            deviceSynchronize=lambda: None,
            driverGetVersion=lambda: 13000,
        ),
    )
    cupyx = types.ModuleType("cupyx")
    cupyx.scipy = types.ModuleType("cupyx.scipy")
    cupyx.scipy.special = scipy.special
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    monkeypatch.setitem(sys.modules, "cupyx.scipy", cupyx.scipy)
    cupy.ndarray = type("ndarray", (), {})  # what runs here are NumPy's arrays
    return cupy


def test_the_device_queues_holds_evictions_and_events(fake_gpu):
    device = Device()
    assert (device.name, device.l2_bytes) == ("Fake GPU 9000", 60)
    fake_gpu.log.clear()
    found = timing.Contest(device, {"a": lambda: fake_gpu.log.append("call")}, budget=1e-9).evicted()
    assert found["a"].median == 250.0
    after_warming = fake_gpu.log[8:13]  # three calls to warm up, three more between two events
    assert after_warming[0][0] == "hold" and after_warming[0][1] >= 50_000
    assert after_warming[1:] == [("memset", 120), "record", "call", "record"]


def test_the_device_captures_graphs_and_ends_captures_that_fail(fake_gpu):
    device, log = Device(), fake_gpu.log
    log.clear()
    device.capture(lambda: log.append("call"))()
    captured = ["begin", *["call"] * GRAPH_CALLS, "end"]
    assert log == ["enter", "call", "synchronize", *captured, "exit", "launch"]
    log.clear()
    calls = iter([None])
    with pytest.raises(StopIteration):
        device.capture(lambda: next(calls))
    assert log == ["enter", "synchronize", "begin", "end", "exit"]


def test_the_laboratory_opens_with_what_is_there(fake_gpu, monkeypatch):
    with laboratory("high", with_torch=False, with_compiler=True) as lab:
        assert (lab.torch, lab.torch_missing, lab.limit("float32")) == (None, "left out on request", 2e-2)
        with pytest.raises(Unavailable, match="left out on request"):
            lab.need_compiler()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals", raising=False)
    monkeypatch.delattr("benchmarks.rivals", raising=False)
    with laboratory("highest", with_torch=True, with_compiler=True) as lab:
        assert lab.torch_missing == "not installed"


# Environment --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"), ("T4 ", "t4")],
)
def test_slug(name, folder):
    assert environment.slug(name) == folder


def test_versions():
    assert environment.cuda_version(13000) == "13.0"
    assert environment.cuda_version(12090) == "12.9"
    assert environment.version("numpy") == np.__version__
    assert environment.version("no-such-package-at-all") is None


def test_the_environment_survives_a_cupy_that_cannot_tell():
    broken = types.SimpleNamespace(__version__="14.2.0", cuda=None)
    found = environment.collect(broken, "Fake GPU 9000")
    assert found["driver_cuda"] is None
    assert found["cuda_runtime"] is None
    assert found["gpu"] == "Fake GPU 9000"
    json.dumps(found)


# Report -------------------------------------------------------------------------------------------------------------


def test_numbers_and_tables():
    assert [number(v) for v in (None, 2797.4, 38.04, 8.414)] == ["–", "2797", "38.0", "8.41"]
    assert table(["a", "b"], [["x|y", "1"]]) == ["| a | b |", "|---|---:|", "| x\\|y | 1 |"]


def test_the_heads_report_holds_times_ratios_and_failures(tmp_path):
    case = Case("The heads", "head_sum", (4, 8, 16), "float32")
    case.results = [
        measured(10.0, rival="cupyfuse", figure="gpu_back_to_back"),
        measured(25.0, rival="torch eager", figure="gpu_back_to_back"),
        Result("torch.compile", failure="not installed"),
        Result("CuPy", 1e-6, missing={"gpu_graph": "RuntimeError: cannot | capture"}),
    ]
    report = Report("heads", ENVIRONMENT, {"quick": True}, cases=[case])
    text = heads_markdown(report, "torch eager")
    assert "| cupyfuse | 1.0e-07 | 10.0 | – | 2.50 |" in text
    assert "- torch.compile: not installed" in text
    assert "- CuPy, GPU, graph: RuntimeError: cannot | capture" in text
    assert "torch not installed or not known" in text
    report.write_json(tmp_path / "heads.json")
    stored = json.loads((tmp_path / "heads.json").read_text())
    times = stored["cases"][0]["results"][0]["times"]["gpu_back_to_back"]
    assert times["n"] == 1 and times["median"] == 10.0 and times["lower_quartile"] == 10.0


def test_the_rows_report_counts_bytes_and_numbers_its_notes():
    cases = []
    for columns in (256, 1000):
        case = Case("softmax float32", f"8 x {columns}", (8, columns), "float32", moved=4_000_000)
        case.results = [measured(2.0), Result("torch eager", failure="not installed")]
        cases.append(case)
    text = rows_markdown(Report("rows", ENVIRONMENT, {}, cases=cases))
    assert "| columns | cupyfuse | torch eager | error |" in text
    assert "| 1000 | 2000 | [1] | 1.0e-07 |" in text  # 4 MB in 2 us
    assert text.count("not installed\n") == 1


def test_cupyfuse_failing_is_a_failure_and_a_rival_failing_is_not():
    case = Case(
        "g", "c", (1, 1), "float32", results=[Result("CuPy", failure="slow"), Result("cupyfuse", failure="bad")]
    )
    assert Report("heads", ENVIRONMENT, {}, cases=[case]).failed() == ["g, c: cupyfuse: bad"]


def test_plots(tmp_path, monkeypatch):
    case = Case(
        "softmax float32", "8 x 256", (8, 256), "float32", 4000, [measured(2.0), measured(3.0, rival="torch eager")]
    )
    case.results.append(measured(9.0, rival="CuPy", figure="gpu_back_to_back"))
    report = Report("rows", ENVIRONMENT, {}, cases=[case])
    if importlib.util.find_spec("matplotlib"):
        for draw in (charts.rows, charts.heads, charts.gemm):
            draw(report, tmp_path / "plot.png")
            assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
            (tmp_path / "plot.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command.write(report, tmp_path, "rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "rows.md"]


# Checking -----------------------------------------------------------------------------------------------------------


def test_the_error_is_the_worst_attempts_and_nan_never_passes(lab):
    expected = [np.array([3.0, 4.0])]
    good, bad, broken = (lambda v=v: [np.array([3.0, v])] for v in (4.0, 4.5, math.nan))
    assert errors_of(Rival(good, [good, bad, good], expected)) == (pytest.approx(0.1), None)
    sized = Rival(good, [good, bad], expected, sizes=[np.array([1.0, 8.0])])
    assert errors_of(sized) == (pytest.approx(0.1), pytest.approx(1 / 16))
    assert all(map(math.isnan, errors_of(Rival(good, [broken, good], expected, sizes=[np.ones(2)]))))
    assert errors_of(Rival(good, [], expected)) == (None, None)
    with pytest.raises(RuntimeError, match="shape"):
        errors_of(Rival(good, [lambda: [np.zeros(3)]], expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_elements_that_were_not_written_are_counted(lab, dtype):
    target = lab.poisoned((3, 4), rows.dtypes.to_numpy(dtype))
    assert lab.unwritten(target) == 12
    target[1:] = 2.0
    assert lab.unwritten(target) == 4
    assert not np.isnan(lab.as_double(target)[1:]).any()


def test_a_function_that_leaves_its_output_unwritten_is_found(lab):
    attempts = lab.fused_attempts(lambda x, out=None: out, (np.ones(2),), ((2, 3), "float32"))
    with pytest.raises(RuntimeError, match="6 of 6 elements"):
        attempts[0]()


def test_wrong_missing_and_raising_rivals_are_reported_and_not_timed(lab):
    expected = [np.ones(4)]

    def unavailable():
        raise Unavailable("not installed")

    makers = {
        "right": lambda: Rival(lambda: None, [lambda: [np.ones(4)]], expected),
        "wrong": lambda: Rival(lambda: None, [lambda: [np.full(4, 2.0)]], expected),
        "nan": lambda: Rival(lambda: None, [lambda: [np.full(4, math.nan)]], expected),
        "raising": lambda: 1 / 0,
        "missing": unavailable,
    }
    case = run(lab, Case("g", "c", (4, 1), "float32"), makers, ("gpu_evicted",), 1e-9)
    failures = {r.rival: r.failure for r in case.results}
    assert failures == {
        "right": "",
        "wrong": "wrong result: relative error 1",
        "nan": "wrong result: relative error nan",
        "raising": "ZeroDivisionError: division by zero",
        "missing": "not installed",
    }
    assert [r.rival for r in case.results if r.times] == ["right"]
    json.dumps([r.error for r in case.results], allow_nan=False)


# Matrix products ----------------------------------------------------------------------------------------------------

SHAPE = (128, 1024, 192)


def drawn(name, shape=SHAPE):
    return (operand.astype(np.float64) for operand in families.draw(name, shape, 0))


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("shape", [(5, 1, 4), (3, 2, 7), (4, 255, 3), SHAPE])
def test_families_are_float32_operands_that_depend_on_the_seed_alone(name, shape):
    m, k, n = shape
    x, weight = families.draw(name, shape, 0)
    assert x.dtype == weight.dtype == np.float32
    assert (x.shape, weight.shape) == ((m, k), (n, k))
    assert np.isfinite(x).all() and np.isfinite(weight).all()
    assert x.flags.c_contiguous and weight.flags.c_contiguous
    again, other = families.draw(name, shape, 0), families.draw(name, shape, 1)
    assert np.array_equal(x, again[0]) and np.array_equal(weight, again[1])
    if shape == SHAPE:
        assert not np.array_equal(x, other[0]) and not np.array_equal(weight, other[1])
    assert families.describe(name).endswith(".")


def test_families_of_plain_distributions():
    for operand in drawn("gaussian"):
        assert abs(operand.mean()) < 0.02 and abs(operand.std() - 1) < 0.02
    for operand in drawn("positive"):
        assert operand.min() >= 0 and operand.max() < 1 and abs(operand.mean() - 0.5) < 0.01
    for operand in drawn("heavy-tailed"):
        beyond = [(abs(operand) > quantile).mean() for quantile in (0.8165, 4.3027, 31.599)]  # of tables of Student's t
        assert beyond == pytest.approx([0.5, 0.05, 0.001], rel=0.25)
    x, weight = drawn("head")
    assert x.min() >= 0 and x.max() < 1
    assert abs(weight).max() <= 1 / 32 and abs(weight.mean()) < 1e-3 and weight.min() < 0 < weight.max()


def test_outliers_are_where_they_are_said_to_be():
    for operand in drawn("outlier-rows"):
        scale = operand.std(axis=1)
        assert (scale > 5000).sum() == len(operand) // 64 and (scale < 2).sum() == len(operand) - len(operand) // 64
    x, weight = ((operand.std(axis=0) > 5000) for operand in drawn("outlier-columns"))
    assert x.sum() == weight.sum() == SHAPE[1] // 64 and not (x & weight).any()


def test_cancelling_sums_grow_and_end_near_zero():
    for depth in (1024, 1023):
        x, weight = drawn("cancelling", (128, depth, 192))
        sizes = abs(x) @ abs(weight).T
        half = depth // 2
        assert np.linalg.norm(x @ weight.T) < 2e-3 * np.linalg.norm(sizes)
        assert np.linalg.norm(x[:, :half] @ weight[:, :half].T) == pytest.approx(np.linalg.norm(sizes) / 2, rel=0.02)


def toward_zero(exact):
    rounded = exact.astype(np.float32)
    return np.where(abs(rounded) > abs(exact), np.nextafter(rounded, np.float32(0)), rounded)


def test_truncated_sums_lose_a_unit_in_every_step():
    def running(x, weight, rounding):
        """What a running sum, rounded to float32, loses in a step, in units in the last place; its relative error."""
        terms = x * weight
        assert np.array_equal(terms, terms.astype(np.float32))
        total, lost = np.float32(0), []
        for term in terms:
            exact = np.float64(total) + term
            total = rounding(exact)
            lost.append((exact - total) / np.spacing(total))
        return np.mean(lost[64:]), abs(total / terms.sum() - 1)

    x, weight = drawn("truncating", (128, 4096, 192))
    assert (x > 0).all() and (weight > 0).all()
    exact = x[0] % 2.0**-13 == 0  # the others are 1 - 2**-24, times a power of two
    assert 0.4 < exact.mean() < 0.6
    for operand in (x[:, exact], weight):
        assert np.array_equal(operand, operand.astype(np.float16))
    for i, j in ((0, 0), (17, 101)):
        zero_loss, zero_error = running(x[i], weight[j], toward_zero)
        nearest_loss, nearest_error = running(x[i], weight[j], np.float32)
        assert zero_loss > 0.9 and abs(nearest_loss) < 0.05
        assert zero_error > 100 * nearest_error and nearest_error < 1e-6
    terms = np.random.default_rng(0).random(4096, np.float32).astype(np.float64)
    assert zero_error > 1.5 * running(terms, np.ones(4096), toward_zero)[1]


@pytest.mark.parametrize("shape", [SHAPE, (8, 96, 130), (4, 1, 7)])
def test_orthogonal_weights_are_so(shape):
    _, weight = drawn("orthogonal", shape)
    small = weight @ weight.T if shape[2] <= shape[1] else weight.T @ weight
    assert abs(small - np.eye(len(small))).max() < 1e-6


def test_low_rank_weights_are_so():
    _, weight = drawn("low-rank")
    values = np.linalg.svd(weight, compute_uv=False)
    assert values[families.RANK - 1] > 5 * values[families.RANK] > 0


def test_errors_of_a_product_by_hand(lab):
    """1 * 3 + 2 * -1 is 1, of size 5; 1.5 errs by half of it and a tenth of its size."""
    x, weight = np.array([[1, 2]], np.float32), np.array([[3, -1]], np.float32)
    product = gemm.Product(lab, x, weight)
    assert product.facts == {"reference": 2.0**-53, "cancellation": 5.0}
    lab.cupy.matmul = lambda x, weight: np.array([[1.5]], np.float32)
    wrong = {gemm.BASE: product.factories()[gemm.BASE]}
    assert errors_of(wrong[gemm.BASE]()) == (0.5, pytest.approx(0.1))
    case = run(lab, Case("g", "c", (1, 2, 1), "float32"), wrong, ("gpu_evicted",), 1e-9)
    assert case.results[0].failure == "wrong result: max error 0.1"
    assert (case.results[0].error, case.results[0].max_error) == (0.5, pytest.approx(0.1))


def test_large_products_are_compared_in_some_rows(lab, monkeypatch):
    monkeypatch.setattr(gemm, "_CHECKED", 3 * 4 * 5)
    x, weight = (np.ones(shape, np.float32) for shape in ((10, 4), (5, 4)))
    rival = gemm.Product(lab, x, weight).factories()[gemm.BASE]()
    assert rival.expected[0].shape == rival.sizes[0].shape == (3, 5)
    assert errors_of(rival) == (0.0, 0.0)


def test_a_product_that_is_rounded_too_coarsely_is_wrong():
    assert gemm.limit("highest", 1) < 2.0**-20 < gemm.limit("high", 1) < gemm.limit("medium", 1) < 2.0**-5
    assert set(gemm._OPERANDS) == set(WRONG) == set(PRECISIONS)


def product_case(name, cancellation, shape=(4, 8, 16), group="Families of data", **errors):
    """Each error is a pair: by norms, and the largest. Times are 1, 2, ... microseconds."""
    case = Case(group, name, shape, "float32", facts={"reference": 1e-15, "cancellation": cancellation})
    for place, (rival, (norm, largest)) in enumerate(errors.items(), 1):
        known = {"bound": gemm.ours("highest", True), "fused": gemm.ours("highest", False), "base": gemm.BASE}
        result = measured(float(place), rival=known.get(rival, rival), figure="gpu_evicted")
        result.error, result.max_error = norm, largest
        case.results.append(result)
    return case


def test_verdicts_follow_from_the_errors():
    good = product_case("gaussian", 9.0, bound=(1e-7, 1e-8), fused=(2e-7, 2e-8), base=(2e-7, 3e-8))
    assert judge(good).largest == (2e-8, 3e-8) and judge(good).norm == (2e-7, 2e-7)
    assert (judge(good).largest_holds, judge(good).norm_holds, judge(good).mixed) == (True, True, True)
    bad = product_case("positive", 1.0, bound=(1e-7, 5e-8), fused=(3e-7, 1e-8), base=(2e-7, 3e-8))
    assert (judge(bad).largest_holds, judge(bad).norm_holds, judge(bad).mixed) == (False, False, False)
    bad.results[0].failure = "out of memory"
    assert (judge(bad).largest_holds, judge(bad).norm) == (None, None)
    assert margin(Report("gemm", ENVIRONMENT, {}, cases=[good])) == pytest.approx(1e-8 / 1e-15)


def products_report():
    cases = [
        product_case("gaussian", 9.0, bound=(1e-7, 1e-8), fused=(2e-7, 2e-8), base=(2e-7, 3e-8)),
        product_case("positive", 1.0, bound=(3e-7, 1e-8), fused=(3e-7, 1e-8), base=(2e-7, 3e-8)),
        *(
            product_case(f"K = {depth}", 2.0, (4, depth, 16), "Over K: gaussian", bound=(1e-7, 0.0), base=(2e-7, 3e-8))
            for depth in (1, 255)
        ),
    ]
    cases[-1].results[-1].failure = "out of memory"
    cases[0].results.append(Result("torch TF32", failure="not installed"))
    return Report("gemm", ENVIRONMENT, {"quick": True}, cases=cases)


def test_the_report_of_products_begins_with_verdicts():
    text = gemm_markdown(products_report())
    assert "- By max error it is no larger in 2 of 2 cases; 2 not measured." in text
    assert "- By Frobenius norms it is no larger in 1 of 1 cases with terms of both signs; 2 not measured." in text
    assert (
        "- By Frobenius norms it is no larger in 0 of 1 cases with terms of one sign, for which nothing is promised."
        in text
    )
    assert "| gaussian | 2.0e-08 | 3.0e-08 | 0.67 | yes | 2.0e-07 | 2.0e-07 | 1.00 | yes |" in text
    assert "| positive | 1.0e-08 | 3.0e-08 | 0.33 | yes | 3.0e-07 | 2.0e-07 | 1.50 | no (one sign) |" in text
    assert "| gaussian | 0.33 | 0.67 | – | – |" in text  # times 1 and 2 over 3 microseconds
    assert "| cupyfuse highest, bound | 1.0e-07 | 1.0e-08 | 1.00 | 3.00 |" in text
    assert "- torch TF32: not installed" in text
    assert "4 x K x 16" in text and "4 x 8 x 16" in text
    assert "| 255 | 0.0e+00 | 3.0e-08 [1] |" in text and text.count("\n1. out of memory") == 1
    assert "is 10,000,000 times that or more" in text  # 1e-8 over 1e-15


def test_the_plot_of_products(tmp_path, capsys):
    command.write(products_report(), tmp_path, "gemm")
    assert {"gemm.json", "gemm.md"} <= {path.name for path in tmp_path.iterdir()}
    if importlib.util.find_spec("matplotlib"):
        assert capsys.readouterr().err == ""
        assert (tmp_path / "gemm.png").read_bytes().startswith(b"\x89PNG")


# Whole benchmarks on NumPy ------------------------------------------------------------------------------------------

SMALL = {"shape": (6, 32, 40), "quick": True}


def check_all_ran(found, figures, without=()):
    for case in found:
        for result in case.results:
            if result.rival in without:
                assert result.failure
                continue
            assert result.failure == "", (case.name, result)
            assert set(result.times) | set(result.missing) == set(figures), (case.name, result)
            assert result.error is None or result.error < 1e-5


def test_the_heads_run_without_torch(lab, hasty):
    found = list(heads.cases(lab, heads.Options(**SMALL, max_autotune=True)))
    assert [case.name for case in found[:4]] == [name for name, _, _ in heads.CASES]
    missing = (heads.EAGER, heads.COMPILED, heads.AUTOTUNED)
    check_all_ran(found[:4], heads.FIGURES, missing)
    check_all_ran(found[4:], tails.FIGURES, (*missing, "torch.logsumexp alone", "torch.softmax alone"))
    assert {r.failure for r in found[0].results if r.rival in missing} == {"not installed"}
    heads_markdown(Report("heads", ENVIRONMENT, {}, cases=found), heads.EAGER)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_heads_agree_with_torch(torch_lab, hasty, dtype):
    found = list(heads.cases(torch_lab, heads.Options(**SMALL, dtype=dtype)))
    for case in found:
        for name in ("cupyfuse, bound", "cupyfuse", "torch eager", "torch.compile"):
            result = case.find(name)
            if result is not None:
                assert result.failure == "", (case.name, name, result.failure)
                assert result.error < (1e-5 if dtype == "float32" else 2e-2)


def test_the_rows_run(torch_lab, hasty, monkeypatch):
    monkeypatch.setattr(rows, "QUICK_BYTES", 1 << 16)
    monkeypatch.setattr(rows, "_BLOCK", 5000)
    monkeypatch.setattr(rows, "_CHECKED", 600)
    options = rows.Options(lengths=(100, 256, 8191), dtypes=("float32",), quick=True)
    found = list(rows.cases(torch_lab, options))
    assert [case.shape for case in found[::2]] == [(163, 100), (64, 256), (2, 8191)]
    check_all_ran(found, ("gpu_evicted",))
    assert found[0].moved == 2 * found[1].moved == 2 * 163 * 100 * 4
    rows_markdown(Report("rows", ENVIRONMENT, {}, cases=found))


def test_the_products_run(torch_lab, hasty):
    chosen = gemm.Options((6, 32, 40), depths=(1, 3), quick=True)
    found = list(gemm.cases(torch_lab, chosen))
    assert [case.name for case in found] == [*families.FAMILIES, *["K = 1", "K = 3"] * 2]
    without_gpu = ("cuBLAS TF32", "cuBLAS bfloat16", "cuBLAS bfloat16, rounded before")
    for case in found:
        for result in case.results:
            if result.rival in without_gpu:
                assert result.failure
                continue
            assert result.failure == "", (case.name, result)
            assert set(result.times) == set(gemm.FIGURES)
            assert result.max_error < 1e-6
    by_name = {case.name: case.facts["cancellation"] for case in found}
    assert by_name["cancelling"] > 50 and by_name["positive"] == pytest.approx(1.0, abs=1e-12)
    report = Report("gemm", ENVIRONMENT, {}, cases=found)
    assert report.failed() == []
    json.dumps(report.cases[0].facts, allow_nan=False)
    gemm_markdown(report)


def test_compiling_stops_when_its_time_is_spent(torch_lab, hasty):
    options = rows.Options(lengths=(64,), dtypes=("float32",), quick=True, compile_budget=1e-9)
    first, second = rows.cases(torch_lab, options)
    assert first.find("torch.compile").failure == ""
    assert "were spent" in second.find("torch.compile").failure


# The command line ---------------------------------------------------------------------------------------------------


def test_without_cupy_or_gpu_the_exit_code_is_2(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert command.main(["heads"]) == 2
    assert "need CuPy and an NVIDIA GPU" in capsys.readouterr().err
    blind = FakeCupy("cupy")
    blind.cuda = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", blind)
    assert command.main(["rows", "--quick"]) == 2
    assert "CuPy finds none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["tables"], ["heads", "--shape", "3x4"], ["heads", "--dtype", "int8"], ["rows", "--lengths", "1,-2"],
     ["rows", "--dtypes", "float32,float8"], ["gemm", "--families", "gaussian,cauchy"], ["gemm", "--depths", "0"]],
)  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_options_become_names_and_settings():
    given = command.parser().parse_args(["heads", "--dtype", "bfloat16", "--shape", "4x5x6", "--precision", "high"])
    name, stated, _ = command.plan(given)
    assert name == "heads-bfloat16-high"
    assert stated["shape"] == "4x5x6"
    name, stated, cases = command.plan(command.parser().parse_args(["rows", "--quick", "--lengths", "8,16"]))
    assert (name, stated["lengths"], stated["compile_budget_s"]) == ("rows", "8 16", command.QUICK_COMPILE_BUDGET)
    assert cases.keywords["options"].size == rows.QUICK_BYTES


def test_options_of_products():
    arguments = ["gemm", "--families", "positive,head", "--shape", "4x5x6", "--seed", "7"]
    name, stated, cases = command.plan(command.parser().parse_args([*arguments, "--depths", "1,9"]))
    assert (name, stated["families"], stated["depths"], stated["shape"]) == ("gemm", "positive head", "1 9", "4x5x6")
    chosen = cases.keywords["options"]
    assert chosen == gemm.Options((4, 5, 6), ("positive", "head"), (1, 9), False, 7)
    shapes = [shape for _, _, _, shape in gemm.plan(chosen)]
    assert shapes == [(4, 5, 6), (4, 5, 6), (256, 1, 512), (256, 9, 512)]
    _, _, cases = command.plan(command.parser().parse_args(["gemm", "--quick"]))
    assert cases.keywords["options"] == gemm.Options(depths=gemm.QUICK_DEPTHS, quick=True)


def test_a_run_from_the_command_line(lab, hasty, monkeypatch, tmp_path, capsys):
    import contextlib

    monkeypatch.setattr(command, "laboratory", lambda *settings: contextlib.nullcontext(lab))
    arguments = ["rows", "--quick", "--lengths", "64", "--dtypes", "float32"]
    assert command.main([*arguments, "--output", str(tmp_path)]) == 0
    assert "# Benchmark `rows` on Fake GPU 9000" in capsys.readouterr().out
    assert {"rows.json", "rows.md"} <= {path.name for path in tmp_path.iterdir()}

    def breaking(lab, options):
        yield Case("g", "c", (1, 1), "float32", results=[Result("cupyfuse", failure="wrong result")])
        raise MemoryError("out of memory")

    monkeypatch.setattr(rows, "cases", breaking)
    assert command.main([*arguments, "--output", str(tmp_path / "second")]) == 1
    told = capsys.readouterr()
    assert "failed: g, c: cupyfuse: wrong result" in told.err
    assert "MemoryError: out of memory" in told.out  # what was measured before is in the report
