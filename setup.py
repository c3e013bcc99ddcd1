"""Builds the C kernels where a compiler is at hand; everything else is in pyproject.toml."""

import os

from setuptools import Extension, setup

LEVEL = os.environ.get("FORERUN_OPTIMISE", "-O3")  # less where checks are compiled in

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
            extra_compile_args=[LEVEL, "-std=gnu11", "-fopenmp", "-Wno-psabi"],
            optional=True,  # without a compiler forerun runs on torch alone
        )
    ]
)
