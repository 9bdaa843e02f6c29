"""The environment of compilers: the variables listed here, and no others.

A compiler reads many variables that no key covers: ``LD_RUN_PATH`` changes libraries, ``PTXAS_FLAGS`` changes
GPU code, ``COMPILER_PATH`` selects other programs. Flags are added by ``FLASHINFER_EXTRA_*``. A launcher gets
another variable by ``env NAME=VALUE`` in the variable that names the launcher.
"""

from __future__ import annotations

import os
from pathlib import Path

from ... import env

# Programs find each other, their libraries, files and user by these. No compiler writes them into its output.
_ALLOWED = {
    "PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME",
}  # fmt: skip
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}  # in lower or upper case
# Variables of caching and distributing launchers and of their stores. No compiler reads them.
_LAUNCHERS = ("CCACHE_", "SCCACHE_", "ICECC_", "DISTCC_", "AWS_", "AZURE_", "GOOGLE_", "ACTIONS_")
# The command, not a variable, selects the compiler that a launcher starts.
_OTHER_COMPILERS = {
    "CCACHE_CC", "CCACHE_COMPILER", "CCACHE_COMPILERTYPE", "CCACHE_PREFIX", "CCACHE_PREFIX_CPP",
    "ICECC_CC", "ICECC_CXX",
}  # fmt: skip


def compiler_environment(folder: str | Path = "") -> dict[str, str]:
    """Return the environment of compilers.

    They may write below ``folder`` if there is no temporary directory.
    """
    allowed = {name: value for name, value in os.environ.items() if _is_allowed(name)}
    if (temporary := env.temporary_dir() or folder) != "":
        allowed["TMPDIR"] = str(temporary)
    # __DATE__ is the same in every build, and messages are in English.
    return allowed | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def _is_allowed(name: str) -> bool:
    if name in _OTHER_COMPILERS:
        return False
    return name in _ALLOWED or name.lower() in _PROXIES or name.startswith(_LAUNCHERS)
