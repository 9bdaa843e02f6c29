"""The environment of compilers: what is listed here, and nothing else.

A compiler reads many variables that no key knows of: ``LD_RUN_PATH`` gets into libraries, ``PTXAS_FLAGS`` into code for
GPUs, ``COMPILER_PATH`` chooses other programs. ``FLASHINFER_EXTRA_*`` is the way to add flags. A launcher that needs another
variable gets it by ``env NAME=VALUE`` in the variable that names the launcher.
"""

from __future__ import annotations

import os
from pathlib import Path

from ... import env

# Where programs find each other, their libraries, their own files and their user: no compiler writes that down.
_ALLOWED = {
    "PATH", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME",
}  # fmt: skip
_PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}  # in small letters or capitals
# Of launchers that cache and distribute, and of the stores behind them; these are no compiler's.
_LAUNCHERS = ("CCACHE_", "SCCACHE_", "ICECC_", "DISTCC_", "AWS_", "AZURE_", "GOOGLE_", "ACTIONS_")
# Which compiler a launcher starts is said by the command.
_OTHER_COMPILERS = {
    "CCACHE_CC", "CCACHE_COMPILER", "CCACHE_COMPILERTYPE", "CCACHE_PREFIX", "CCACHE_PREFIX_CPP",
    "ICECC_CC", "ICECC_CXX",
}  # fmt: skip


def compiler_environment(folder: str | Path = "") -> dict[str, str]:
    """Return the environment of compilers that may write below ``folder``, where there is no temporary directory."""
    kept = {name: value for name, value in os.environ.items() if _is_allowed(name)}
    if (temporary := env.temporary_dir() or folder) != "":
        kept["TMPDIR"] = str(temporary)
    # The date that a source asks for is the same in every build; messages are in English.
    return kept | {"LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}


def _is_allowed(name: str) -> bool:
    if name in _OTHER_COMPILERS:
        return False
    return name in _ALLOWED or name.lower() in _PROXIES or name.startswith(_LAUNCHERS)
