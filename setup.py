"""Builds the C kernels where a compiler is at hand; everything else is in pyproject.toml."""

import os

from setuptools import Extension, setup

OPTIMISED = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]  # the last one would win

setup(
    ext_modules=[
        Extension(
            "forerun.native._kernels",
            sources=["src/forerun/native/kernels.c"],
            depends=[
                f"src/forerun/native/{name}.h"
                for name in (
                    "types",
                    "team",
                    "isa",
                    "vector",
                    "linear",
                    "amx",
                    "pieces",
                    "scores",
                    "soon",
                    "tiles",
                    "attend",
                    "decoder",
                    "memory",
                )
            ],
            # OpenMP's functions are found at run time in the library that torch has loaded
            extra_compile_args=[*OPTIMISED, "-std=gnu11", "-fopenmp", "-Wno-psabi"],
            optional=True,  # without a compiler forerun runs on torch alone
        )
    ]
)
