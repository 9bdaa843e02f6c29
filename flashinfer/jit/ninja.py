"""Ninja files and configuration headers of builds, rendered by pure functions.

Each spec has a ninja file, and a top file includes them.

Paths are absolute or relative to ninja's directory. Four facts of ninja shape the files: only the top file
may have ``default``; its rules are visible in every child; two specs with one output abort it; a newline
cannot be escaped, so no spec contains one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import env
from . import process
from .machine.target import Target
from .machine.toolchain import Toolchain
from .spec import TORCH_ABI, Spec

# The ABIs of the C++ library, for which compilers of some distributions have another default, and of torch.
_ABI_FLAGS = ["-D_GLIBCXX_USE_CXX11_ABI=1", f"-DTORCH_TARGET_VERSION={TORCH_ABI[0] << 56 | TORCH_ABI[1] << 48:#018x}"]


def escape(path: str) -> str:
    """Escape a path for a build line of ninja."""
    return path.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def words(command: Iterable[str]) -> str:
    """Return one shell-quoted command in which ninja expands nothing."""
    return " ".join(map(shlex.quote, command)).replace("$", "$$")


def objects(spec: Spec, directory: str) -> dict[str, str]:
    """Map the object of every unit, ``<directory>/<stem>.o``, to the unit's name in the spec."""
    return {f"{directory}/{PurePath(unit).stem}.o": unit for unit in spec.units()}


def is_plain(path: str) -> bool:
    """Return whether every tool accepts a path: nvcc splits at commas, and its shell expands dollars."""
    return re.fullmatch(r"[\w./+@%~^-]+", path, re.ASCII) is not None


def links(spec: Spec) -> dict[str, str]:
    """Map folders whose paths are not plain to names of links to them, in the build directory."""
    folders = enumerate(spec.folders())
    return {folder: f"folder.{number}/" for number, folder in folders if not is_plain(folder)}


def render_spec(
    spec: Spec, target: Target, directory: str, linked: Mapping[str, str] | None = None, folder: str = ""
) -> str:
    """Return the ninja file of a spec: an edge for each unit, and one that links them.

    Args:
        directory: the build directory below ninja's directory, a name that needs no escape.
        linked: folders to reach through links in ``directory``, see :func:`links`.
        folder: ninja's directory, which debug information must not contain.
    """
    through = {old: f"{directory}/{new}" for old, new in (linked or {}).items()}

    def reached(path: str) -> str:
        root = next((root for root in spec.folders() if f"{path}/".startswith(root)), "")
        return f"{through[root]}{path[len(root) :]}".rstrip("/") if root in through else path

    includes = [f"-I{directory}", *(f"-I{reached(path)}" for path in spec.include_dirs)]
    names = [f"-DFLASHINFER_MODULE={spec.name}", f"-DFLASHINFER_NAMESPACE={spec.namespace}"]
    defines = [*names, f"-DFLASHINFER_{spec.backend.upper()}=1"]
    # Equal sources elsewhere give equal bytes: no path of this machine in __FILE__ or in debug information. A
    # compiler applies the last matching prefix, while the first matching folder names a file. Hence the
    # reversed order.
    shown = {root: f"./{name.replace('<', 'user/').replace('>', '')}" for root, name in spec.folders().items()}
    has_debug = any(flag.startswith("-g") for flag in (*spec.cflags, *spec.cuda_cflags))
    prefixes = {folder: "."} if folder and has_debug and is_plain(folder) else {}
    prefixes[f"{directory}/"] = "./"
    prefixes |= {through.get(root, root): name for root, name in reversed(shown.items())}
    maps = [f"-ffile-prefix-map={old}={new}" for old, new in prefixes.items()]
    cxx_flags = [*spec.cflags, *(target.flags() if spec.backend == "cpu" else ())]
    lines = [
        f"# {spec.name}: {spec.backend}, {' '.join(target.archs)}",
        f"module = {spec.name}",
        f"cflags = {words([*cxx_flags, *defines, *includes, *maps])}",
    ]
    outputs, order = objects(spec, directory), ""
    if spec.backend == "cuda":
        stub, host = f"{directory}/libtorch_cuda.so", [f"-Xcompiler={flag}" for flag in maps]
        lines.append(f"cuda_cflags = {words([*spec.cuda_cflags, *target.flags(), *defines, *includes, *host])}")
        lines.append(f"build {stub}: stub")
        order = f" || {stub}"
    lines += [f"ldflags = {words([f'-L{directory}', *spec.ldflags])}", ""]
    for file, (source, *more) in zip(outputs, spec.units().values(), strict=True):
        rule, flags = ("nvcc", "cuda_cflags") if source.endswith(".cu") else ("cxx", "cflags")
        if rule == "nvcc":
            # nvcc hashes this name, not the source's path, into names of kernels without linkage.
            unit = re.sub(r"[^\w.+-]", "_", PurePath(file).stem, flags=re.ASCII)
            more = [*more, f"-Xcudafe=--orig_src_path_name={unit}.cu"]
        lines.append(f"build {escape(file)}: {rule} {escape(reached(source))}")
        if more:
            lines.append(f"  {flags} = ${flags} {words(more)}")
    lines.append(f"build {directory}/{spec.name}.so: link_{spec.backend} {' '.join(map(escape, outputs))}{order}")
    return "\n".join(lines) + "\n"


def render_graph(
    directories: Mapping[str, Spec], toolchain: Toolchain, runner: Iterable[str] = (), log_directory: str = ""
) -> str:
    """Return the top file: the rules, and one ``subninja`` line per spec (``directory -> spec``).

    ``runner``: a program that runs every command as ``runner... FILE -- command...``, where FILE is the
    command's output.
    """
    lines = ["ninja_required_version = 1.5", *([f"builddir = {escape(log_directory)}"] if log_directory else [])]
    # exec: no shell remains, and the runner leads the process group that ninja makes for each command.
    prefix = f"exec {words(runner)} $out -- " if runner else ""
    for name, command in _rules(toolchain):
        # ninja prints the description. It begins with the module's name for a reader of the output.
        lines += [f"rule {name}", f"  command = {prefix}{command}", "  description = $module $command"]
        lines += ["  depfile = $out.d"] if "$out.d" in command else []
    lines += [f"subninja {directory}/build.ninja" for directory in directories]
    lines += ["default " + " ".join(f"{directory}/{spec.name}.so" for directory, spec in directories.items())]
    return "\n".join(lines) + "\n"


def _rules(toolchain: Toolchain) -> Iterator[tuple[str, str]]:
    """Yield the name and the command of every rule."""
    cxx = [*toolchain.cxx_launcher, toolchain.cxx, "-MMD", "-MF"]
    torch = toolchain.torch_dir  # must not appear in __FILE__ of its headers
    flags = [*_ABI_FLAGS, "-isystem", f"{torch}/include", f"-ffile-prefix-map={torch}/=torch/"]
    link = [toolchain.cxx, "-shared", f"-L{torch}/lib", "-Wl,--no-as-needed"]
    yield "cxx", f"{words(cxx)} $out.d {words(flags)} $cflags -c $in -o $out"
    yield "link_cpu", f"{words(link)} -o $out $in -ltorch_cpu $ldflags"
    if toolchain.nvcc is None:
        return
    compiler = [toolchain.nvcc, "-ccbin", toolchain.cxx]
    # Equal bytes everywhere: objects contain names of temporary files and the command of a device link.
    nvcc = [*toolchain.nvcc_launcher, *compiler, "-objtemp", "-MMD", "-MF"]
    link = [*compiler, "-shared", "-nodlink", "-cudart=static", "-Xlinker=--no-as-needed"]
    # A link needs only the soname of libtorch_cuda: at run time torch has already loaded the real library.
    stub = [toolchain.cxx, "-shared", "-nostdlib", "-Wl,-soname,libtorch_cuda.so", "-x", "c", "/dev/null", "-o"]
    yield "nvcc", f"{words(nvcc)} $out.d {words(_ABI_FLAGS)} $cuda_cflags -c $in -o $out"
    # torch's directory follows that of the stub, so that the stub is found before the real library.
    yield "link_cuda", f"{words(link)} -o $out $in -ltorch_cpu -ltorch_cuda $ldflags {words([f'-L{torch}/lib'])}"
    yield "stub", f"{words(stub)} $out"


def render_config(spec: Spec) -> str:
    """Return the text of ``spec.config_header``. It is equal everywhere for equal specs."""
    loader = FileSystemLoader(env.data_root())
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    values = {"config": dict(spec.config), "coverage": dict(spec.coverage)}
    with process.without_forks():  # jinja2 has locks of its own
        template = environment.get_template(spec.template)
        return template.render(name=spec.name, config_header=spec.config_header, **values)
