"""Builds the C kernels where a compiler is at hand; everything else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

LEVEL = os.environ.get("FORERUN_OPTIMISE", "-O3")  # less where checks are compiled in


class Build(build_ext):
    """What cannot be compiled leaves nothing old behind that would run in its place."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception:
            source = self.get_finalized_command("build_py").get_package_dir("forerun.runner.native")
            name = self.get_ext_filename(ext.name)
            for path in (Path(self.build_lib, name), Path(source, Path(name).name)):
                if path.exists():
                    path.unlink()
                    self.warn(f"{path} was of older sources and is removed")
            self.warn(
                "the C kernels were not compiled: forerun runs on torch, several times slower"
            )
            raise


setup(
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            "forerun.runner.native._kernels",
            sources=["src/forerun/runner/native/kernels.c"],
            depends=[
                f"src/forerun/runner/native/{name}.h"
                for name in (
                    "types",
                    "team",
                    "isa",
                    "vector",
                    "linear",
                    "sums",
                    "pairs",
                    "amx",
                    "pieces",
                    "scores",
                    "prefetch",
                    "tiles",
                    "attend",
                    "decoder",
                    "memory",
                    "top_probs",
                )
            ],
            # OpenMP's functions are found at run time in the library that torch has loaded
            extra_compile_args=[LEVEL, "-std=gnu11", "-fopenmp", "-Wno-psabi"],
            optional=True,  # without a compiler forerun runs on torch alone
        )
    ],
)
