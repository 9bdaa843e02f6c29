"""Simulate the start of a fleet, and start 100 real processes on this machine.

The simulation has 1,000 hosts of 8 ranks and a store with S3's limits. It runs the decisions of the real
client event by event. A GET takes 20 ms and more (lognormal, median 35). Each partition serves 5,500 GET/s
and answers 503 above that. A host's link has 10 Gbit/s. A module that no store returns is compiled.
"""

from __future__ import annotations

import argparse
import heapq
import io
import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from flashinfer.jit.remote import transfer, transport

SIZE, LINK, LIMIT = 1_300_000, 10e9 / 8, 5500.0  # bytes of a module, bytes/s of a host, GET/s of a partition
COMPILE, CPUS = 30.0, 32  # seconds of a module, and modules that a host compiles at once


class Pending(BaseException):
    """Request of the real client without an answer yet. The client runs again when the answer is there."""


class Clock:
    """Replacement of the modules ``time`` and ``random`` of the real client."""

    now, generator = 0.0, random.Random(0)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def uniform(self, low: float, high: float) -> float:
        return self.generator.uniform(low, high)


class Partition:
    """Bucket of ``LIMIT`` requests per second, one second's worth at once. It rejects further requests."""

    def __init__(self) -> None:
        self.tokens, self.since = LIMIT, 0.0

    def takes(self, now: float) -> bool:
        self.tokens, self.since = min(LIMIT, self.tokens + (now - self.since) * LIMIT), now
        taken = self.tokens >= 1
        self.tokens -= taken
        return taken


class Simulation:
    """Hosts that start within ``jitter`` seconds, with names hashed to ``partitions``."""

    def __init__(self, hosts: int, modules: int, partitions: int, jitter: float) -> None:
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.random, self.clock = itertools.count(), random.Random(1), Clock()
        self.partitions = [Partition() for _ in range(partitions)]
        self.count, self.bytes, self.ready = Counter[str](), 0, list[float]()
        self.hosts, self.modules, self.jitter = hosts, modules, jitter

    def at(self, when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), what))

    def run(self) -> None:
        for name, value in (("time", self.clock), ("random", self.clock), ("say", lambda text: None)):
            setattr(transport, name, value)
        transport._within = lambda seconds, request: request(seconds)
        for number in range(self.hosts):
            host = Host(self, number)
            self.at(self.random.uniform(0, self.jitter), host.start)
        while self.events:
            now, _, what = heapq.heappop(self.events)
            what(now)

    def answer(self, now: float, module: int) -> tuple[float, Exception | None]:
        """Return seconds until the store answers, and the status of a rejection."""
        self.count["reads"] += 1
        took = 0.02 + self.random.lognormvariate(-4.2, 0.6)
        if self.partitions[module % len(self.partitions)].takes(now):
            return took, None
        self.count["503"] += 1
        return took, urllib.error.HTTPError("", 503, "Slow Down", {}, io.BytesIO())  # type: ignore[arg-type]


class Host:
    """One host.

    The first of its ranks holds the module's lock, so the host asks once, ``transfer.AT_ONCE`` at a time.
    """

    def __init__(self, of: Simulation, number: int) -> None:
        self.of, self.number, self.store = of, number, transport.Store("unsigned+http://store")
        self.store._transport = self
        self.left, self.link, self.missing, self.last = iter(range(of.modules)), 0.0, 0, 0.0
        self.script, self.busy = list[tuple[float, Exception | None]](), 0

    def start(self, now: float) -> None:
        for _ in range(transfer.AT_ONCE):
            self.busy += 1
            self.next(now)

    def next(self, now: float) -> None:
        module = next(self.left, None)
        if module is not None:
            return self.proceed(now, module, [])
        self.busy -= 1
        if not self.busy:
            rounds = -(-self.missing // CPUS)
            self.of.count["compiles"] += self.missing
            self.of.ready.append(self.last + rounds * COMPILE)

    def proceed(self, began: float, module: int, script: list[tuple[float, Exception | None]]) -> None:
        """Run the real client from its beginning with the answers so far, until it asks again or returns."""
        clock, store = self.of.clock, self.store
        clock.now, clock.generator = began, random.Random(self.number * 1000 + module)
        self.script, left, off = list(script), store.left, store.off
        try:
            data = store.get(f"{module}/key", again=True)
        except Pending:
            store.left, store.off = left, off
            self.of.at(clock.now, lambda now: self.ask(now, began, module, script))
            return
        end = clock.now
        if data is None:
            self.missing += 1
        else:
            self.link = end = max(self.link, end) + SIZE / LINK
            self.of.bytes += SIZE
        self.last = max(self.last, end)
        self.of.at(end, self.next)

    def ask(self, now: float, began: float, module: int, script: list[tuple[float, Exception | None]]) -> None:
        script.append(self.of.answer(now, module))
        self.of.at(now + script[-1][0], lambda _: self.proceed(began, module, script))

    def get(self, name: str, seconds: float) -> bytes:
        """Transport of the real client."""
        if not self.script:
            raise Pending
        took, refusal = self.script.pop(0)
        self.of.clock.sleep(took)
        if refusal is not None:
            raise refusal
        return b"object"


def simulate(hosts: int, ranks: int, modules: int, jitter: float) -> None:
    print(f"simulated: {hosts} hosts x {ranks} ranks x {modules} modules of {SIZE / 1e6} MB, starts within {jitter} s")
    gets, saved = hosts * modules, (transport.time, transport.random, transport.say, transport._within)
    print(f"  on paper: {gets} GETs, {gets * SIZE / 1e9:.0f} GB, {modules * SIZE / 1e6:.0f} MB a host")
    for partitions in (1, modules):
        floor = max(gets / LIMIT / partitions, modules * SIZE / LINK) + jitter * (gets / LIMIT / partitions < jitter)
        one = Simulation(hosts, modules, partitions, jitter)
        began = time.perf_counter()
        one.run()
        took, ready = time.perf_counter() - began, sorted(one.ready)
        print(
            f"  {partitions:3} partitions: {one.count['compiles'] / modules:.2f} compiles a key of a warm store,"
            f" {one.count['reads']} reads ({one.count['503']} answered 503), {one.bytes / 1e9:.1f} GB; ready after"
            f" {ready[len(ready) // 2]:.2f} s (median), {ready[-1]:.2f} s (last); floor {floor:.2f} s,"
            f" {ready[-1] / floor:.2f}x of it; simulated in {took:.1f} s"
        )
    transport.time, transport.random, transport.say, transport._within = saved  # type: ignore[assignment]


class Objects(BaseHTTPRequestHandler):
    """Local store that counts requests."""

    kept: ClassVar[dict[str, bytes]] = {}
    count: ClassVar[Counter[str]] = Counter()

    def do_GET(self) -> None:
        data = self.kept.get(self.path)
        self.count["reads"] += 1
        self.count["bytes"] += len(data or b"")
        self.send_response(200 if data is not None else 404)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        there = self.headers.get("If-None-Match") == "*" and self.path in self.kept
        self.kept.setdefault(self.path, data)
        self.send_response(412 if there else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


CROWD = """
import os, sys, time
from flashinfer.jit import gen_jit_spec
import flashinfer.jit.build, flashinfer.jit.remote.transfer
count, source = int(sys.argv[1]), sys.argv[2]
for _ in range(count):
    if os.fork() == 0:
        gen_jit_spec("crowd", [source]).build()
        os._exit(0)
codes = [os.wait()[1] for _ in range(count)]
sys.exit(any(codes))
"""


def real(processes: int, hosts: int) -> None:
    print(f"real: {processes} processes on {hosts} hosts of this machine (workspaces of their own), one cold key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        (top / "unit.cc").write_text('extern "C" int answer() { return 1; }\n')
        log, launcher = top / "log", top / "count"
        launcher.write_text(f'#!/bin/sh\necho + >> {log}\nexec "$@"\n')
        launcher.chmod(0o755)
        url = f"unsigned+http://127.0.0.1:{server.server_port}/modules"
        for title, publish, names in (
            ("without a store", None, ["alone"]),
            ("a cold store, published to", "1", ["first"]),
            ("a warm store", "0", [f"host{number}" for number in range(hosts)]),
        ):
            log.unlink(missing_ok=True)
            Objects.count.clear()
            began = time.perf_counter()
            running = []
            for name in names:
                place = {
                    "FLASHINFER_WORKSPACE_DIR": str(top / name),
                    "FLASHINFER_RUNTIME_DIR": str(top / f"{name}.run"),
                }
                store = {"FLASHINFER_STORE": url, "FLASHINFER_STORE_PUBLISH": publish} if publish else {}
                command = [sys.executable, "-c", CROWD, str(processes // len(names)), str(top / "unit.cc")]
                variables = {**os.environ, **place, **store, "FLASHINFER_CXX_LAUNCHER": str(launcher)}
                running.append(subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL))
            codes = [one.wait() for one in running]
            compiles = log.read_text().count("+") if log.exists() else 0
            print(
                f"  {title}, {len(names)} hosts: {compiles} compiles, {Objects.count['reads']} reads,"
                f" {Objects.count['bytes']} bytes, all ready after {time.perf_counter() - began:.2f} s"
                + ("" if not any(codes) else f"; FAILED: {codes}")
            )
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("hosts", 1000), ("ranks", 8), ("modules", 40), ("processes", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--jitter", type=float, default=2.0)
    options: Any = parser.parse_args()
    simulate(options.hosts, options.ranks, options.modules, options.jitter)
    real(options.processes, 10)


if __name__ == "__main__":
    main()
