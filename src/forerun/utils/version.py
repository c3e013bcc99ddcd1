"""The version of forerun, and the name it writes into its files."""

__version__ = "0.1.0"
MADE_BY = "forerun"
