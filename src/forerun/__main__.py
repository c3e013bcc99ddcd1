"""`python -m forerun` and the command `forerun`: Ctrl-C has its answer from the first import on."""

from __future__ import annotations


def main() -> int:
    """Runs the command line; returns the exit status: 130 for Ctrl-C before anything was begun."""
    try:
        from forerun.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        import sys

        print("interrupted before anything was begun", file=sys.stderr)
        return 130


if __name__ == "__main__":
    import sys

    sys.exit(main())
