"""A command group with errors that suggest the nearest command."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any

import typer
from typer.core import TyperGroup

from forerun.errors import UnknownName


class Commands(TyperGroup):
    """A group that suggests the nearest command for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Prints the help and exits with status 2 if there is no command."""
        if not args:
            with redirect_stdout(sys.stderr):  # rich prints help where it is made
                typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a line's first word. Raises UnknownName."""
        known = self.list_commands(ctx)
        if args[0] not in known:
            raise UnknownName.of("command", args[0], known, f"see `{ctx.command_path} --help`")
        return super().resolve_command(ctx, args)
