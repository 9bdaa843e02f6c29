"""Reads the arguments of ``python -m flashinfer`` and runs one command.

Exit codes: 0 done; 1 a build failed or this machine lacks something; 2 the command itself cannot be: an unknown
name, a malformed environment variable.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import EnvironmentValueError, FlashInferError


class UsageError(Exception):
    """The command names something that does not exist."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flashinfer", description="Modules of flashinfer on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.add_argument("--json", action="store_true", help="print JSON")
        return one

    command("list", "Every module of the AOT matrix: what it covers, and the key of its present sources.")
    command("status", "Every artifact in the AOT directories and the workspace, and what a load would make of it.")
    build = command("build", "Build modules into the workspace, all in one run.")
    build.add_argument("names", nargs="+", metavar="NAME", help="a module, as `list` names it")
    build.add_argument("--verbose", action="store_true", help="show every command and its output")
    config = command("show-config", "Every environment variable that is read, its value now and its default.")
    config.add_argument("--markdown", action="store_true", help="print the table of README.md")
    command("doctor", "What building and using modules needs, whether this machine has it, and how to get it.")
    clean = command("clean", "Remove everything that was built into the workspace.")
    clean.add_argument("--yes", action="store_true", help="do it; without this, only say what would be removed")
    export = command("export-compile-commands", "Write compile_commands.json, for clangd and other tools of an IDE.")
    export.add_argument("--output", type=Path, metavar="FILE", help="by default compile_commands.json in the checkout")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse(arguments)
    try:
        return run(options)
    except (EnvironmentValueError, UsageError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except FlashInferError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return 0


def run(options: argparse.Namespace) -> int:
    # Each command's file is imported for that command alone: most need neither a compiler nor a template.
    if options.command == "list":
        from .modules import list_modules

        return list_modules(options.json)
    if options.command == "status":
        from .modules import status

        return status(options.json)
    if options.command == "build":
        from .modules import build_modules

        return build_modules(options.names, options.verbose, options.json)
    if options.command == "show-config":
        from .config import show_config

        return show_config(options.json, options.markdown)
    if options.command == "doctor":
        from .doctor import doctor

        return doctor(options.json)
    if options.command == "clean":
        from .modules import clean

        return clean(options.yes, options.json)
    from .compile_commands import export

    return export(options.output, options.json)
