"""Standard output that is closed or full, and Ctrl-C: a message, an exit status that says so, and no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import IO, Any

import pytest
from support import ROOT

from cupyfuse.cli import commands as cli
from cupyfuse.cli import output
from cupyfuse.selftest.progress import Progress

COMMANDS = {
    "version": ["--version"],
    "help": ["explain", "--help"],
    "info": ["info"],
    "explain": ["explain", "head_softmax", "--source"],
    "demo": ["demo", "--rows", "4", "--in-features", "5", "--out-features", "6", "--engine", "numpy"],
}
each_command = pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())


def start(arguments: list[str], stdout: int | IO[Any], **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cupyfuse", *arguments]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, **more)


def messages(process: subprocess.Popen[str]) -> str:
    """What a process writes to standard error until it ends, without its progress."""
    text = process.communicate(timeout=120)[1]
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("["))


@pytest.mark.rotates
@each_command
def test_a_reader_may_stop_reading(arguments: list[str]) -> None:
    """As in `| head`: nothing is said, and the status is that of a program which SIGPIPE ended."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        process = start(arguments, pipe)
    os.close(read)
    assert messages(process) == ""
    assert process.returncode == output.READER_GONE == 141


@pytest.mark.rotates
@each_command
def test_a_full_disk_is_reported(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = start(arguments, full)
    assert messages(process) == "cupyfuse: standard output cannot be written: No space left on device\n"
    assert process.returncode == 1


@pytest.mark.rotates
@each_command
def test_a_closed_standard_output_is_reported(arguments: list[str]) -> None:
    code = "import sys; sys.stdout = None; from cupyfuse.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "cupyfuse: standard output is closed"
    assert "Traceback" not in done.stderr and done.returncode == 1


def test_arguments_that_make_no_sense_are_status_2_whatever_standard_output_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["explain", "nothing"])
    assert caught.value.code == 2


def test_a_failure_is_not_hidden_by_a_reader_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_info", lambda *_: cli.Outcome(1, "text\n"))
    monkeypatch.setattr(output, "write", lambda text: output.READER_GONE)
    assert cli.main(["info"]) == 1


@pytest.mark.parametrize("stream", ["none", "full"])
def test_standard_error_may_be_closed_or_full(stream: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Full:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", None if stream == "none" else Full())
    assert cli.main(COMMANDS["demo"]) == 0
    output.write_error("nobody reads it")
    printed = capsys.readouterr().out
    assert "Every fused result" in printed and "[1/" not in printed and "nobody" not in printed


def test_nobody_reads_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `2>&1 | head`: the command stops."""

    class Gone:
        def isatty(self) -> bool:
            return False

        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    with pytest.raises(BrokenPipeError), Progress(1) as progress:
        progress.stage("one")
    assert cli.main(COMMANDS["demo"]) == output.READER_GONE


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    arguments = ["selftest", "--quick", "--engine", "numpy"]
    # Background jobs of shells without job control ignore the signal, and so would their children.
    process = start(arguments, subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stderr is not None
    assert process.stderr.readline().startswith("[1/")
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert printed == "" and said.splitlines()[-1] == "cupyfuse: interrupted"
    assert "Traceback" not in said


def test_an_interrupted_command_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_info", interrupted)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr().err == "cupyfuse: interrupted\n"
