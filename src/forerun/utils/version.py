"""The version of forerun, and the name that it signs files with."""

__version__ = "0.1.0"
MADE_BY = "forerun"
