"""Benchmarks against unfused CuPy, PyTorch and torch.compile: `python -m benchmarks heads`, `rows`, ...

Every result is checked against float64 before it is timed, rivals take turns within one run, and what a rival could not
do is reported in its own words. The report lands in `benchmarks/results/<gpu>/` as JSON and Markdown.

A benchmark is a module with `add_options`, `DEFAULTS`, `cases` and `report_lines`, listed in `__main__`. `cases` makes
the rivals of each case (`rivals.Computation` of arrays, `pytorch.Step` of modules and losses), has them checked and
timed in turns (`lab.run`, by a `timing.Contest` on a `device`), and yields what came of it (`report.Case`);
`report_lines` puts that, and the requirements on it, into `tables`. What needs torch is in `pytorch`; `distributed`
runs several processes.
"""
