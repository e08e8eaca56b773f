"""Benchmarks against unfused CuPy, PyTorch and torch.compile: `python -m benchmarks heads`, `rows`, ...

Every result is checked against float64 before it is timed, rivals take turns within one run, and what a rival could not
do is reported in its own words. The report lands in `benchmarks/results/<gpu>/` as JSON and Markdown.

A benchmark is a module with `add_options`, `DEFAULTS`, `cases` and `write`, listed in `__main__`. `cases` says what is
computed (`rivals.Computation`) and runs it (`lab.run`, by `timing.Contest` on a `device`); `write` puts what came of it
(`report.Case`), and the requirements on it, into `tables`. What needs torch is in `pytorch`.
"""
