"""The module in C; all else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cupyfuse_launcher",
            ["cupyfuse_launcher.c"],
            extra_compile_args=["-std=c11"],
            py_limited_api=True,
        )
    ]
)
