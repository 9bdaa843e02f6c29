"""Run the families' tests with another torch or Python, on modules that were built with this one.

python scripts/try_torch.py 2.15.0                        # the families below
python scripts/try_torch.py 2.10.0 --python python3.10 -- tests/norm -k rmsnorm

The script makes an environment in ``data/torch/<version>-<python>`` once, and runs pytest there with this
checkout, its ``data/aot`` and its workspace. The tests compile modules with the headers of the other torch.
The exit status is pytest's. docs/torch.md has the table of tried versions.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = (
    "norm", "activation", "page", "decode", "prefill", "sampling", "mla", "gemm", "rope", "delta_rule", "torch",
)  # fmt: skip
# Tests import these. Other packages of the extra `test` are for builds, stores and models.
PACKAGES = ("hypothesis", "numpy", "pyelftools", "pytest", "pytest-xdist", "setuptools")
ASK = "import platform, torch; print(platform.python_version(), torch.__version__)"


def environment_of(version: str, python: str) -> Path:
    """Return the interpreter of an environment with a torch. Make the environment if it is missing."""
    number = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], check=True, capture_output=True, text=True
    ).stdout.strip()
    folder = ROOT / "data" / "torch" / f"{version}-{number}"
    interpreter, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        needs = [need for need in dependencies() if re.split("[<>=]", need)[0] != "torch"]
        install = [str(interpreter), "-m", "pip", "install", "--quiet", f"torch=={version}", *needs, *PACKAGES]
        # The environment must ignore a user's or a machine's constraint on torch.
        subprocess.run(install, check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull})
        done.touch()
    return interpreter


def dependencies() -> list[str]:
    """Return the package's dependencies. Python 3.10 has no TOML parser."""
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [\n")
    return re.findall(r'^    "(.+)",$', rest.partition("\n]\n")[0], re.MULTILINE)


def main() -> int:
    """Make the environment, run the tests and return their exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="version of torch, such as 2.15.0")
    parser.add_argument("--python", default=sys.executable, help="interpreter; this one by default")
    parser.epilog = "After -- stand pytest's arguments, by default the families' tests."
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:cut])
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?(\+\w+)?", options.version):
        parser.error(f"version: got {options.version!r}, wanted a release of torch such as 2.15.0")
    interpreter = environment_of(options.version, options.python)
    tests = sys.argv[cut + 1 :] or [f"tests/{family}" for family in FAMILIES]
    variables = {"PYTHONPATH": str(ROOT), "PATH": f"{interpreter.parent}{os.pathsep}{os.environ['PATH']}"}
    found = subprocess.run([str(interpreter), "-c", ASK], check=True, capture_output=True, text=True).stdout.split()
    print(f"Python {found[0]}, torch {found[1]}", flush=True)
    command = [str(interpreter), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode


if __name__ == "__main__":
    sys.exit(main())
