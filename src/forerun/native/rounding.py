"""How weights are held, by the word that users write for it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError


@dataclass(frozen=True)
class Rounding:
    """How weights are held: their own 16 or 32 bits, or 8 and a scale per `scaled` inputs."""

    bits: int = 16
    scaled: int = 0  # inputs of an output that share a scale; 0: all

    @classmethod
    def parse(cls, text: str) -> Rounding:
        """From "auto", "int8" or "int8:128"."""
        name, _, scaled = str(text).partition(":")
        if text == "auto":
            return cls()
        if name != "int8" or (scaled and not scaled.isdecimal()):
            raise ConfigError(
                f"weights must be auto, int8 or int8:INPUTS, got {text!r}; try int8, or int8:128 "
                "with finer scales"
            )
        if scaled and (int(scaled) < 32 or int(scaled) % 4):
            raise ConfigError(
                f"inputs per scale must be a multiple of 4 and at least 32, got {scaled}"
            )
        return cls(8, int(scaled or 0))


KEPT = Rounding()
