"""The module in C; all else is in setup.cfg."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cupyfuse_launcher",
            ["cupyfuse_launcher.c", "launches.c", "calls.c"],
            depends=["cupyfuse_launcher.h"],
            extra_compile_args=["-std=c11", "-fvisibility=hidden"],
            py_limited_api=True,
        )
    ]
)
