"""The command line: parse, call, print.

Results go to stdout and everything else to stderr. An error is one message and exit code 2, with nothing on stdout.
"""

from __future__ import annotations

from dgraph.cli.app import app, main

__all__ = ["app", "main"]
