"""A first call whose module has to be built: how many files of the package a reader follows, and their order."""

from __future__ import annotations

import json

from flashinfer.jit.resolve import SOURCES

from ..support.processes import answering

MOST = 20  # files
CROSSED = """
    import json, os, sys, threading
    import torch
    import flashinfer
    from flashinfer.jit import gen_jit_spec
    root, files = os.path.dirname(flashinfer.__file__) + os.sep, set()
    def watch(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            files.add(frame.f_code.co_filename.removeprefix(root))
    threading.setprofile(watch)
    sys.setprofile(watch)
    gen_jit_spec("tiny", sys.argv[1:]).build_and_load()
    sys.setprofile(None)
    print(json.dumps(sorted(files)))
"""


def test_a_first_call_that_builds_crosses_few_files(make_spec, python, compilers_started):
    """Imported files count too."""
    done = python(CROSSED, make_spec("tiny", answering(61)).source_paths()[0])
    files = json.loads(done.stdout)
    assert compilers_started() == 1 and {"jit/load.py", "jit/resolve.py", "jit/build.py", "jit/lock.py"} <= set(files)
    assert len(files) <= MOST, files


def test_the_order_of_sources():
    assert [type(source).__name__ for source in SOURCES] == ["AotDirectories", "Workspace", "Remote", "Build"]
    assert [source.reads_only for source in SOURCES] == [True, True, False, False], "the others need the lock"
