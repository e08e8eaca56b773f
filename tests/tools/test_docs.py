"""The README and the documentation: generated parts, snippets, links, paths, commands, and the site."""

from __future__ import annotations

import argparse
import configparser
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import docs_script

from cupyfuse.cli import commands
from cupyfuse.ir.operators import elementary

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("kernels_cu/*.md"),
        *ROOT.glob("tests/**/*.md"),
    )
)
pages = pytest.mark.parametrize("page", PAGES)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", read(page), re.DOTALL | re.MULTILINE)


def without_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", read(page), flags=re.DOTALL | re.MULTILINE)


def spans(page: str) -> list[str]:
    """Return the inline code of a page."""
    return re.findall(r"`([^`\n]+)`", without_blocks(page))


# Generated parts ----------------------------------------------------------------------------------------------------


def test_the_page_of_supported_functions_is_current() -> None:
    """PyTorch 2.11 has no `linear_cross_entropy`."""
    page = read("docs/supported.md")
    if not hasattr(torch.nn.functional, "linear_cross_entropy"):
        page = page.replace("`linear_cross_entropy`, ", "")
    assert page == docs_script("supported").page(), "run python docs/scripts/supported.py"


def test_the_page_of_registers_has_todays_kernels() -> None:
    """Their templates and threads; what they take differs between versions of NVRTC."""
    registers = docs_script("registers")
    page = read("docs/registers.md")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    found = [re.findall(r"(`\w+` \d+) ×", cells) for _, cells in rows]
    expected: dict[tuple[str, int], list[str]] = {}
    for entry in registers.entries():
        expected.setdefault((entry.program, entry.length), []).append(registers.head_of(entry.kernel))
    assert found == list(expected.values()), "run python -m docs.scripts.registers"


def test_the_readme_is_current() -> None:
    """Its results and pictures are those of the reports, its plan is the one that is printed."""
    readme = docs_script("readme")
    assert read("README.md") == readme.readme(), "run python docs/scripts/readme.py"
    assert read("docs/speedups.svg") == readme.chart(), "run python docs/scripts/readme.py"
    assert read("docs/plan.svg") == readme.picture(), "run python docs/scripts/readme.py"
    assert read("docs/rows.svg") == docs_script("heat_map").picture(), "run python -m docs.scripts.heat_map"


def test_float32_results_are_as_accurate_as_pytorch() -> None:
    """The README says so of every float32 row."""
    readme = docs_script("readme")
    for case in readme.CASES:
        rows = readme.tables(case.report)[case.section, case.case]
        ours, eager = (float(rows[case.rivals[i]]["error"]) for i in (2, 0))
        assert ours <= eager or "float32" not in case.title, case.title


# What pages contain -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_snippets_run(page: str) -> None:
    namespace: dict[str, Any] = {"torch": torch, **vars(elementary)}
    namespace["model"] = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(1))
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), namespace)


@pages
def test_relative_links_resolve(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", without_blocks(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page} links to {target}#{anchor}"


@pages
def test_paths_exist(page: str) -> None:
    """Paths in inline code are relative to the repository or the package; a bare file name belongs to either."""
    names = {
        path.name
        for folder in ("cupyfuse", "kernels_cu", "tests", "examples", "docs")
        for path in (ROOT / folder).rglob("*")
    }
    for span in spans(page):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]*)*\.(py|cu|cuh|md|cfg|txt|toml|yaml|yml)|[\w.-]+(/[\w.-]+)*/", span):
            continue
        roots = (ROOT, ROOT / "cupyfuse", ROOT / "tests", (ROOT / page).parent)
        assert span in names or any((root / span).exists() for root in roots), f"{page} names {span}"


@pages
def test_lists_render(page: str) -> None:
    """A list needs a blank line before it, or mkdocs merges it into the paragraph."""
    lines = without_blocks(page).splitlines()
    for before, line in itertools.pairwise(lines):
        if re.match(r"(- |\d+\. )", line):
            assert not before or re.match(r"(- |\d+\. |#|\s)", before), f"{page}: no blank line before {line!r}"


@pages
def test_commands_exist(page: str) -> None:
    shown = [line for block in blocks(page, "sh") for line in block.splitlines()]
    for line in (*shown, *spans(page)):
        for command in re.split(r"&&|;", line.partition(" #")[0].replace("FILE", "page.md")):
            words = itertools.dropwhile(lambda word: re.fullmatch(r"\w+=.*", word), shlex.split(command, posix=True))
            check_command(list(words), f"{page}: {line}")


def check_command(words: list[str], where: str) -> None:
    """Fail for a command of this repository that does not exist, or does not take these arguments."""
    match words:
        case ["python", "-m", "cupyfuse", *arguments]:
            assert parses(commands._parser(), arguments), where
        case ["python", "-m", "benchmarks", *arguments]:
            from benchmarks.__main__ import parser

            assert parses(parser(), arguments), where
        case ["python", path, *_] if path.endswith(".py"):
            assert (ROOT / path).is_file(), where
        case ["make", *words]:
            targets = {word for word in words if "=" not in word}
            assert targets <= set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE)), where
        case ["pip", "install", *arguments]:
            setup = configparser.ConfigParser()
            setup.read(ROOT / "setup.cfg")
            extras = [e for a in arguments for e in re.findall(r"[\w-]+", (re.findall(r"^\.\[(.*)\]$", a) or [""])[0])]
            assert all(extra in setup["options.extras_require"] for extra in extras), where
            files = [b for a, b in itertools.pairwise(arguments) if a in ("-c", "-r")]
            assert all((ROOT / file).is_file() for file in files), where


def parses(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    try:
        parser.parse_args(arguments)
    except SystemExit as exit_:
        return exit_.code == 0
    return True


def test_the_rewrites_that_are_described_exist() -> None:
    rules = {
        name
        for path in (ROOT / "cupyfuse" / "rewrite").glob("*.py")
        for name in re.findall(r"^def (\w+)", path.read_text(), re.M)
    }
    table = read("docs/numerics.md").partition("## The rewrites")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert cells and set(re.findall(r"`(\w+)`", " ".join(cells))) <= rules


def test_the_site_builds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "index.html").is_file() and (tmp_path / "index.html").is_file()
