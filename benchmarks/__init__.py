"""Benchmarks against unfused CuPy, PyTorch and torch.compile: `python -m benchmarks heads`, `rows`, ...

Every result is checked against float64 before it is timed, rivals take turns within one run, and what a rival could not
do is reported in its own words. The report lands in `benchmarks/results/<gpu>/` as JSON and Markdown.
"""
