"""Use of the build system by a program, in any condition of the process: ``fault_run.py RESULT SOURCE...``.

The sources are those of three modules: one to load, one with a rendered header, one that does not compile.
RESULT contains ``done`` if everything was right, else the error.
"""

from __future__ import annotations

import sys
import traceback


def main(result: str, good: str, other: str, bad: str) -> None:
    with open(result, "w") as file:
        try:
            work(good, other, bad)
            file.write("done\n")
        except BaseException:
            file.write(traceback.format_exc())


def work(good: str, other: str, bad: str) -> None:
    import ctypes
    import warnings

    import torch

    from flashinfer import jit
    from flashinfer.errors import BuildError

    warnings.simplefilter("ignore")  # of a temporary workspace
    heard: list[str] = []
    jit.subscribe(lambda event: heard.append(event.kind))
    first, wrong = jit.gen_jit_spec("first", [good]), jit.gen_jit_spec("wrong", [bad])
    # With a header that is rendered, as all of the library's own have.
    rendered = {"template": "csrc/config.h.jinja", "config_header": "other_config.h", "coverage": {"size": [3]}}
    second = jit.gen_jit_spec("other", [other], **rendered)
    try:
        jit.build_jit_specs([first, wrong, second], verbose=True)
        raise AssertionError("what is no C++ has been compiled")
    except BuildError as err:
        assert type(err) is BuildError and err.name == "wrong" and "error" in err.reason, err
    assert [ctypes.CDLL(str(spec.build().path)).answer() for spec in (first, second)] == [1, 3]
    assert heard.count("compile") == 2 and heard.count("hit") == 2, heard
    first.build_and_load()
    assert any(path.endswith("/first.so") for path in torch.ops.loaded_libraries)
    jit.prefetch([first, second]).wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
