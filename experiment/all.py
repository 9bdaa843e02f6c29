
import os, sys, runpy, traceback, time
W, OUT = os.environ["W"], os.environ["OUT"]
def script(name, *args):
    sys.argv = [name, *args]
    try: runpy.run_path(f"{W}/experiment/{name}.py", run_name="__main__")
    except BaseException: traceback.print_exc()
    print(name, args, "until", round(time.monotonic() - T, 1), flush=True)
def cli(*args):
    from flashinfer.__main__ import main
    try: print("cli", main(list(args)))
    except BaseException as e: traceback.print_exc()
T = time.monotonic()
script("cost", "mla fa3")
cli("profile", "mla", "--batch", "64", "--kv-len", "4096", "--out", f"{OUT}/b64.json", "--html", f"{OUT}/b64.html")
cli("profile", "mla", "--batch", "1", "--kv-len", "32768", "--out", f"{OUT}/b1.json", "--html", f"{OUT}/b1.html")
script("kernels")
script("cost", "prefill fa3")
script("cost", "fa2")
