"""Weight formats and the texts that users write for them."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError

INT4_GROUP_SIZES = (32, 64, 128, 256)  # inputs per scale


@dataclass(frozen=True)
class WeightFormat:
    """The format of weights: as stored (16 or 32 bits), or quantized with scales."""

    bits: int = 16
    group_size: int = 0  # inputs per scale of an output; 0: all
    is_float: bool = False  # 8 bits are a floating-point number

    @classmethod
    def parse(cls, text: str) -> WeightFormat:
        """From "auto", "int8", "int8:128", "fp8", "int4" or "int4:64"."""
        name, _, inputs = str(text).partition(":")
        if text == "auto":
            return cls()
        if text == "fp8":
            return cls(8, is_float=True)
        if name not in ("int8", "int4") or not (inputs.isdecimal() or text == name):
            raise ConfigError(
                f"weights must be auto, int8 or int8:INPUTS, got {text!r}; try int8, or int8:128 "
                "with finer scales; on a GPU also fp8, int4 and int4:INPUTS"
            )
        if name == "int4":
            found = cls(4, int(inputs or 128))
            if found.group_size not in INT4_GROUP_SIZES:
                raise ConfigError(
                    f"inputs per scale of int4 must be one of {INT4_GROUP_SIZES}, got {inputs}; "
                    "try int4:128"
                )
            return found
        if inputs and (int(inputs) < 32 or int(inputs) % 4):
            raise ConfigError(
                f"inputs per scale must be a multiple of 4 and at least 32, got {inputs}"
            )
        return cls(8, int(inputs or 0))

    @property
    def has_cpu_kernel(self) -> bool:
        """Whether the native CPU kernels support this format."""
        return self.bits == 16 or (self.bits == 8 and not self.is_float)


UNQUANTIZED = WeightFormat()
