"""The benchmarks without a GPU: statistics, turns, reports and the command line; the cases themselves run on NumPy."""

import json
import math
import sys
import types

import numpy as np
import pytest
import scipy.special
from benchmark_lab import ENVIRONMENT, FakeCupy, FakeDevice, timed

from benchmarks import __main__ as command
from benchmarks import chains, environment, families, gemm, heads, row_programs, rows, timing
from benchmarks.__main__ import markdown
from benchmarks.device import GRAPH_CALLS, Device
from benchmarks.lab import measure_errors, open_lab, run
from benchmarks.report import Case, Report, Result
from benchmarks.rivals import Computation, Rival, Unavailable
from benchmarks.tables import Column, number, table

# Statistics and turns -----------------------------------------------------------------------------------------------


def test_summary_of_known_numbers():
    summary = timing.summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert summary == timing.Summary(5, 3.0, 1.0, 5.0, 2.0, 4.0)
    assert timing.summarize([7.0]) == timing.Summary(1, 7.0, 7.0, 7.0, 7.0, 7.0)
    with pytest.raises(ValueError, match="samples"):
        timing.summarize([])


@pytest.mark.parametrize(("turns", "count"), [(50, 7), (7, 7), (20, 1), (50, 49)])
def test_each_rival_gets_its_count_of_turns(turns, count):
    taken = [turn for turn in range(turns) if timing.is_turn(turn, turns, count)]
    assert len(taken) == count
    gaps = np.diff([-1, *taken])
    assert gaps.max() - gaps.min() <= 1  # spread evenly


def test_clamp():
    assert [timing.clamp(w, 5, 50) for w in (0.0, 7.9, 1e9, math.inf, math.nan)] == [5, 7, 50, 50, 50]


def test_errors_are_described_in_one_short_line():
    assert timing.describe(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert timing.describe(KeyError()) == "KeyError"
    assert len(timing.describe(RuntimeError("x" * 1000))) == 240


def test_a_contest_goes_in_turns_and_drops_who_fails():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": lambda: 1 / 0}
    contest = timing.Contest(FakeDevice(), calls, budget=1e-9)
    order.clear()
    found = contest.measure("gpu_evicted")
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert {name: summary.n for name, summary in found.items()} == {"a": 7, "b": 7}
    assert contest.failures == {"c": "ZeroDivisionError: division by zero"}


def test_a_rival_that_fails_later_is_out_and_says_why():
    calls = iter(range(8))
    contest = timing.Contest(FakeDevice(), {"a": lambda: next(calls)}, budget=1e-9)
    assert contest.measure("gpu_evicted") == {}
    assert "StopIteration" in contest.failures["a"]
    assert contest.measure("host") == contest.measure("gpu_back_to_back") == {}


def test_a_graph_that_fails_leaves_the_rival_in(lab):
    def rival(capture):
        return lambda: Rival(lambda: None, [], [], capture)

    captures = {"a": lambda: lambda: None, "b": lambda: lambda: 1 / 0, "c": lambda: 1 / 0, "d": None}
    rivals = {name: rival(capture) for name, capture in captures.items()}
    case = run(lab, Case("g", "c", (1,), "float32"), rivals, ("gpu_evicted", "gpu_graph"), 1e-9)
    assert [list(result.times) for result in case.results] == [["gpu_evicted", "gpu_graph"], *[["gpu_evicted"]] * 3]
    missing = {"gpu_graph": "ZeroDivisionError: division by zero"}
    assert [result.missing for result in case.results] == [{}, missing, missing, {}]
    assert not any(result.failure for result in case.results)


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
    found = timing.Contest(device, {"a": lambda: fake_gpu.log.append("call")}, budget=1e-9).measure("gpu_evicted")
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
    with open_lab("high", with_torch=False, with_compiler=True) as lab:
        assert (lab.torch, lab.torch_missing, lab.error_limit("float32")) == (None, "left out on request", 2e-2)
        with pytest.raises(Unavailable, match="left out on request"):
            lab.need_torch(compiling=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "benchmarks.pytorch", raising=False)
    monkeypatch.delattr("benchmarks.pytorch", raising=False)
    with open_lab("highest", with_torch=True, with_compiler=True) as lab:
        assert lab.torch_missing == "not installed"


# Environment --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"), ("T4 ", "t4")],
)
def test_slug(name, folder):
    assert environment.slug(name) == folder


def test_the_environment_survives_a_cupy_that_cannot_tell():
    broken = types.SimpleNamespace(__version__="14.2.0", cuda=None)
    found = environment.collect("Fake GPU 9000", broken)
    assert found["driver_cuda"] is None
    assert found["cuda_runtime"] is None
    assert (found["gpu"], found["numpy"]) == ("Fake GPU 9000", np.__version__)
    json.dumps(found)


# Report -------------------------------------------------------------------------------------------------------------


def test_numbers_and_tables():
    assert [number(v) for v in (None, 2797.4, 38.04, 8.414)] == ["–", "2797", "38.0", "8.41"]
    columns = [Column("a", lambda row: row[0]), *(Column(f"b{k}", lambda row, k=k: row[k], rival=True) for k in (1, 2))]
    head = ["| a | b1 | b2 |", "|---|---:|---:|"]
    assert table(columns, [("x|y", 1.0, None)], min) == [*head, "| x\\|y | 1.00 | – |", ""]
    assert table(columns, [("x", 1.0, 2.0)], min) == [*head, "| x | **1.00** | 2.00 |", ""]
    assert table(columns, [("x", 1.0, 2.0)], max) == [*head, "| x | 1.00 | **2.00** |", ""]
    assert table(columns, [("x", 1.0, "[1]")]) == [*head, "| x | 1.00 | [1] |", ""]


def test_the_heads_report_holds_times_ratios_and_failures(tmp_path):
    case = Case("The heads", "head_sum", (4, 8, 16), "float32")
    case.results = [
        timed("cupyfuse", gpu_back_to_back=10.0),
        timed("torch eager", gpu_back_to_back=25.0),
        Result("torch.compile", failure="not installed"),
        Result("CuPy", 1e-6, missing={"gpu_graph": "RuntimeError: cannot | capture"}),
    ]
    report = Report("heads", ENVIRONMENT, {"quick": True}, cases=[case])
    text = markdown(report)
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
        case = Case("softmax float32", f"8 x {columns}", (8, columns), "float32", bytes_moved=4_000_000)
        case.results = [timed("cupyfuse", gpu_evicted=2.0), Result("torch eager", failure="not installed")]
        cases.append(case)
    text = markdown(Report("rows", ENVIRONMENT, {}, cases=cases))
    assert "| columns | cupyfuse | torch eager | error |" in text
    assert "| 1000 | 2000 | [1] | 1.0e-07 |" in text  # 4 MB in 2 us
    assert text.count("not installed\n") == 1


def test_cupyfuse_failing_is_a_failure_and_a_rival_failing_is_not():
    case = Case(
        "g", "c", (1, 1), "float32", results=[Result("CuPy", failure="slow"), Result("cupyfuse", failure="bad")]
    )
    assert Report("heads", ENVIRONMENT, {}, cases=[case]).failed() == ["g, c: cupyfuse: bad"]


# Checking -----------------------------------------------------------------------------------------------------------


def test_the_error_is_the_worst_attempts_and_nan_never_passes(lab):
    expected = [np.array([3.0, 4.0])]
    good, bad, broken = (lambda v=v: [np.array([3.0, v])] for v in (4.0, 4.5, math.nan))
    assert measure_errors(Rival(good, [good, bad, good], expected)) == (pytest.approx(0.1), None)
    sized = Rival(good, [good, bad], expected, sizes=[np.array([1.0, 8.0])])
    assert measure_errors(sized) == (pytest.approx(0.1), pytest.approx(1 / 16))
    assert all(map(math.isnan, measure_errors(Rival(good, [broken, good], expected, sizes=[np.ones(2)]))))
    assert measure_errors(Rival(good, [], expected)) == (None, None)
    with pytest.raises(RuntimeError, match="shape"):
        measure_errors(Rival(good, [lambda: [np.zeros(3)]], expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_elements_that_were_not_written_are_counted(lab, dtype):
    target = lab.allocate_poisoned((3, 4), rows.dtypes.to_numpy(dtype))
    assert lab.count_unwritten(target) == 12
    target[1:] = 2.0
    assert lab.count_unwritten(target) == 4
    assert not np.isnan(lab.as_double(target)[1:]).any()


def test_a_function_that_leaves_its_output_unwritten_is_found(lab):
    rival = Computation(lab, [], (2, 3), "float32").by_ours(lambda x, out=None: out, np.ones(2))
    with pytest.raises(RuntimeError, match="6 of 6 elements"):
        rival.attempts[0]()


def test_wrong_missing_and_raising_rivals_are_reported_and_not_timed(lab):
    expected = [np.ones(4)]

    def unavailable():
        raise Unavailable("not installed")

    factories = {
        "right": lambda: Rival(lambda: None, [lambda: [np.ones(4)]], expected),
        "wrong": lambda: Rival(lambda: None, [lambda: [np.full(4, 2.0)]], expected),
        "nan": lambda: Rival(lambda: None, [lambda: [np.full(4, math.nan)]], expected),
        "raising": lambda: 1 / 0,
        "missing": unavailable,
    }
    case = run(lab, Case("g", "c", (4, 1), "float32"), factories, ("gpu_evicted",), 1e-9)
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


# Whole benchmarks on NumPy ------------------------------------------------------------------------------------------


def run_all(lab, arguments):
    given = command.parse(arguments.split())
    found = list(command.BENCHMARKS[given.benchmark][0].cases(lab, given))
    report = Report(given.benchmark, ENVIRONMENT, command.stated_options(given), cases=found)
    json.dumps(report.options, allow_nan=False)
    assert report.failed() == []
    markdown(report)
    return found


def check_all_ran(found, figures, without=(), limit=1e-5):
    for case in found:
        for result in case.results:
            if result.rival in without:
                assert result.failure
                continue
            assert result.failure == "", (case.name, result)
            assert set(result.times) | set(result.missing) == set(figures), (case.name, result)
            assert result.error is None or result.error < limit


def test_the_heads_run_without_torch(lab, hasty):
    found = run_all(lab, "heads --shape 6x32x40 --quick --max-autotune")
    assert [case.name for case in found[:4]] == [name for name, _, _ in heads.CASES]
    missing = ("torch eager", "torch.compile", "torch.compile, max-autotune")
    check_all_ran(found[:4], heads.FIGURES, missing)
    check_all_ran(found[4:], heads.TAIL_FIGURES, (*missing, "torch.logsumexp alone", "torch.softmax alone"))
    assert {r.failure for r in found[0].results if r.rival in missing} == {"not installed"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_heads_agree_with_torch(torch_lab, hasty, dtype):
    for case in run_all(torch_lab, f"heads --shape 6x32x40 --quick --dtype {dtype}"):
        for name in ("cupyfuse, bound", "cupyfuse", "torch eager", "torch.compile"):
            result = case.find(name)
            if result is not None:
                assert result.failure == "", (case.name, name, result.failure)
                assert result.error < (1e-5 if dtype == "float32" else 2e-2)


def test_the_rows_run(torch_lab, hasty, monkeypatch):
    monkeypatch.setitem(rows.DEFAULTS, "bytes", (1 << 16, 1 << 16))
    monkeypatch.setattr(rows, "_BLOCK", 5000)
    monkeypatch.setattr(rows, "_CHECKED", 600)
    found = run_all(torch_lab, "rows --quick --lengths 100,256,8191 --dtypes float32 --programs softmax,logsumexp")
    assert [case.shape for case in found[::2]] == [(163, 100), (64, 256), (2, 8191)]
    check_all_ran(found, ("gpu_evicted",))
    assert found[0].bytes_moved == 2 * found[1].bytes_moved == 2 * 163 * 100 * 4


@pytest.mark.parametrize("name", row_programs.PROGRAMS)
def test_each_row_program_agrees_with_torch(torch_lab, hasty, monkeypatch, name):
    monkeypatch.setitem(rows.DEFAULTS, "bytes", (1 << 15, 1 << 15))
    (case,) = run_all(torch_lab, f"rows --quick --lengths 100 --dtypes float32 --programs {name}")
    check_all_ran([case], ("gpu_evicted",))
    program = row_programs.PROGRAMS[name]
    assert case.bytes_moved == program.passes * (8192 // program.matrices // 100) * 100 * 4


@pytest.mark.parametrize("name", chains.TAILS)
def test_each_chain_agrees_with_torch(torch_lab, hasty, name):
    (case,) = run_all(torch_lab, f"chains --quick --dtype float32 --shape 20x48x33 --tails {name}")
    check_all_ran([case], ("gpu_evicted",))


def test_chains_take_shapes_in_turn_and_the_page_says_which_are_behind(torch_lab, hasty, monkeypatch):
    monkeypatch.setattr(chains, "SHAPES", ((6, 8, 10), (12, 4, 9)))
    found = run_all(torch_lab, "chains --quick --dtype float32 --tails gelu,relu,softmax")
    assert [(case.name, case.shape) for case in found] == [
        ("gelu", (6, 8, 10)),
        ("softmax", (6, 8, 10)),
        ("relu", (12, 4, 9)),
    ]
    times = {"gelu": (10.0, 1e-3), "softmax": (4.0, 2e-3), "relu": (8.0, 1e-3)}
    for case in found:
        ours, error = times[case.name]
        case.results = [timed("cupyfuse, bound", error, gpu_evicted=ours), timed("torch eager", 1e-3, gpu_evicted=8.0)]
    text = markdown(Report("chains", ENVIRONMENT, {}, cases=found))
    assert "3 chains, geometric mean 1.17 times the better rival" in text
    assert "Below 0.98 of it: gelu (0.80)." in text and "With a larger error than eager's: softmax." in text


def test_the_products_run(torch_lab, hasty):
    found = run_all(torch_lab, "gemm --parts float32 --shape 6x32x40 --depths 1,3 --quick")
    assert [case.name for case in found] == [*families.FAMILIES, *["K = 1", "K = 3"] * 2]
    without_gpu = ("cuBLAS TF32", "cuBLAS bfloat16", "cuBLAS bfloat16, rounded before")
    check_all_ran(found, gemm.FIGURES, without_gpu, limit=1.0)  # by norm, what cancels has a large error
    assert all(r.max_error < 1e-6 for case in found for r in case.results if not r.failure)
    by_name = {case.name: case.facts["cancellation"] for case in found}
    assert by_name["cancelling"] > 50 and by_name["positive"] == pytest.approx(1.0, abs=1e-12)


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
    given = command.parse(["heads", "--dtype", "bfloat16", "--shape", "4x5x6", "--precision", "high"])
    assert command.file_name(given) == "heads-bfloat16-high"
    assert command.stated_options(given)["shape"] == "4x5x6"
    given = command.parse(["rows", "--quick", "--lengths", "8,16"])
    assert given.lengths == (8, 16)
    assert command.stated_options(given)["lengths"] == "8 16"
    assert (command.file_name(given), given.bytes) == ("rows", rows.DEFAULTS["bytes"][1])
    given = command.parse(["gemm", "--families", "positive,head", "--shape", "4x5x6", "--depths", "1,9"])
    assert (command.file_name(given), command.stated_options(given)["families"]) == ("gemm", "positive head")
    assert [shape for *_, shape in gemm.operand_cases(given)] == [(4, 5, 6), (4, 5, 6), (256, 1, 512), (256, 9, 512)]
    assert command.parse(["gemm", "--quick"]).depths == gemm.DEFAULTS["depths"][1]


def test_a_run_from_the_command_line(lab, hasty, monkeypatch, tmp_path, capsys):
    import contextlib

    monkeypatch.setattr(command, "open_lab", lambda *settings: contextlib.nullcontext(lab))
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
