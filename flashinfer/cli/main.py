"""Read the arguments of ``flashinfer`` (also ``python -m flashinfer``) and run one command.

Exit codes: 0, done; 1, a build or a proof failed, or this machine lacks something; 2, the command is invalid: an unknown
name, a malformed environment variable, a cluster without a suitable worker. ``trace`` returns its program's code.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from types import ModuleType

from ..errors import ClusterError, EnvironmentValueError, FlashInferError
from .usage import UsageError

# Command: its file, with HELP, arguments() and run(). Only that file is imported, because most need no compiler.
COMMANDS = {
    "list": "list",
    "build": "build",
    "why": "why",
    "trace": "trace",
    "verify": "verify",
    "profile": "profile",
    "store": "store",
    "export": "export",
    "import": "import_",
    "clean": "clean",
    "doctor": "doctor",
    "compile-commands": "compile_commands",
}


def command(name: str) -> ModuleType:
    """Import the file of a command."""
    return importlib.import_module(f".{COMMANDS[name]}", __package__)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the command and its options."""
    parser = argparse.ArgumentParser(prog="flashinfer", description="Modules of flashinfer on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS:
        one = command(name)
        one.arguments(commands.add_parser(name, help=one.HELP, description=one.HELP).add_argument)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be text
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = command(options.command).run(options)
        return code
    except (ClusterError, EnvironmentValueError, UsageError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except FlashInferError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return 0
