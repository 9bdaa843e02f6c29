"""Read the arguments of ``flashinfer`` (also ``python -m flashinfer``) and run one command.

Exit codes: 0 done; 1 a build failed, a proof failed or this machine lacks something; 2 the command itself cannot
be: an unknown name, a malformed environment variable, a cluster without a worker for it. ``trace`` ends with the code
of the program it ran.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from types import ModuleType

from ..errors import ClusterError, EnvironmentValueError, FlashInferError
from .usage import UsageError

# Command -> its file, which has HELP, arguments() and run(). Only that one is imported: most need neither a compiler
# nor a template.
COMMANDS = {
    "list": "list",
    "status": "status",
    "build": "build",
    "aot": "aot",
    "why": "why",
    "trace": "trace",
    "profile": "profile",
    "verify": "verify",
    "store": "store",
    "export": "export",
    "import": "import_",
    "gc": "gc",
    "clean": "clean",
    "doctor": "doctor",
    "show-config": "config",
    "export-compile-commands": "compile_commands",
}


def command(name: str) -> ModuleType:
    """The file of a command."""
    return importlib.import_module(f".{COMMANDS[name]}", __package__)


def parse(arguments: list[str]) -> argparse.Namespace:
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
