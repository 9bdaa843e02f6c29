"""Reads the arguments of ``python -m flashinfer`` and runs one command.

Exit codes: 0 done; 1 a build failed, a proof failed or this machine lacks something; 2 the command itself cannot
be: an unknown name, a malformed environment variable. ``trace`` ends with the code of the program it ran.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ..errors import EnvironmentValueError, FlashInferError
from .usage import UsageError, cuda_archs, size_limit

# Command -> the function that runs it, imported for that command alone: most need neither a compiler nor a template.
COMMANDS = {
    "list": ("modules:list_modules", "Every module of the AOT matrix: what it covers, and the key of its present sources."),
    "status": ("modules:status", "Every artifact in the AOT directories and the workspace, and what a load would make of it."),
    "build": ("modules:build_modules", "Build modules into the workspace, all in one run."),
    "why": ("why:why", "What a load of a module wants, and where the nearest artifact differs; 1 if it would be built."),
    "trace": ("trace:trace", "Run a program and record every module that it, and every process it starts, asks for."),
    "verify": ("verify:verify", "Prove that a program that asks for these modules compiles nothing; 1 if it would."),
    "export": ("archive:export", "Pack built modules into one archive: .tar, .tar.gz or .tar.zst."),
    "import": ("archive:import_", "Unpack an archive of modules, each checked before it is published."),
    "gc": ("gc:gc", "Remove what was not used for longest, until the workspace is small enough; and what is left over."),
    "clean": ("modules:clean", "Remove everything that was built into the workspace."),
    "doctor": ("doctor:doctor", "What building and using modules needs, whether this machine has it, and how to get it."),
    "show-config": ("config:show_config", "Every environment variable that is read, its value now and its default."),
    "export-compile-commands": ("compile_commands:export", "Write compile_commands.json, for clangd and other tools of an IDE."),
}  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flashinfer", description="Modules of flashinfer on this machine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add: dict[str, Any] = {}
    for name, (_, help) in COMMANDS.items():
        one = commands.add_parser(name, help=help, description=help)
        one.add_argument("--json", action="store_true", help="print JSON")
        add[name] = one.add_argument
    add["build"]("names", nargs="+", metavar="NAME", help="a module, as `list` names it")
    add["build"]("--verbose", action="store_true", help="show every command and its output")
    add["why"]("name", metavar="NAME", help="a module, as `list` names it, or one of --specs")
    add["why"]("--specs", type=Path, metavar="FILE", help="the modules that `trace` wrote down")
    add["trace"]("-o", "--output", type=Path, required=True, metavar="FILE", help="the specs, a line of JSON for each")
    add["trace"]("program", nargs="+", metavar="-- PROGRAM", help="the program and its arguments")
    add["verify"](
        "--specs", type=Path, metavar="FILE", help="what `trace` wrote; by default every module of the matrix"
    )
    add["verify"]("--cuda-arch", type=cuda_archs, metavar="LIST", help='GPUs of the machine meant, such as "9.0 8.0"')
    add["verify"]("--cpu-arch", metavar="LEVEL", help="CPU level of the machine meant, such as x86-64-v3")
    for name, verb in (("export", "write"), ("import", "read")):
        add[name]("archive", type=Path, metavar="ARCHIVE", help=f"the file to {verb}")
    add["export"]("names", nargs="*", metavar="NAME", help="a module, as `list` names it; by default every ready one")
    add["export"]("--specs", type=Path, metavar="FILE", help="the modules that `trace` wrote down")
    add["export"]("--from", dest="source", type=Path, metavar="DIR", help="every module of a directory, as it is")
    add["import"]("--to", type=Path, metavar="DIR", help="a directory for FLASHINFER_AOT_DIR; by default the workspace")
    add["gc"]("--max-size", type=size_limit, metavar="SIZE", help="by default FLASHINFER_WORKSPACE_MAX_SIZE")
    add["gc"]("--dry-run", action="store_true", help="only say what would be removed")
    add["clean"]("--yes", action="store_true", help="do it; without this, only say what would be removed")
    add["show-config"]("--markdown", action="store_true", help="print the table of README.md")
    add["export-compile-commands"](
        "--output", type=Path, metavar="FILE", help="by default compile_commands.json in the checkout"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse(arguments)
    place, _, function = COMMANDS[options.command][0].partition(":")
    try:
        code: int = getattr(importlib.import_module(f".{place}", __package__), function)(options)
        return code
    except (EnvironmentValueError, UsageError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    except FlashInferError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return 0
