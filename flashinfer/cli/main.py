"""Entry point of ``flashinfer`` (also ``python -m flashinfer``): parse the arguments and run one command.

Exit codes: 0, done; 1, a build or a proof failed, or this machine lacks something; 2, the command is invalid:
an unknown name, an invalid environment variable, a cluster without a suitable worker. ``trace`` returns its
program's code.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from contextlib import suppress
from types import ModuleType

from ..errors import ClusterError, EnvironmentValueError, FlashInferError
from ..jit.report import write
from .usage import UsageError

# Command -> its file, which has HELP, arguments() and run(). Only this file is imported: most need no
# compiler.
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
    """Run one command and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError, ValueError):  # closed, or not reconfigurable
            sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be valid text
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code: int = command(options.command).run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (ClusterError, EnvironmentValueError, UsageError) as err:
        write(f"error: {err}\n")
        return 2
    except FlashInferError as err:
        write(f"error: {err}\n")
        return 1
    except BrokenPipeError:  # the reader of a pipe closed it
        _discard_output()
        return 0
    except OSError as err:
        _discard_output()
        write(f"error: {err}\n")
        return 1


def _discard_output() -> None:
    """Discard the buffer of standard output. The interpreter would fail to write it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
