"""A kernel's track of events, compiled for the CPU: its words, counts and drops."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
import torch

from flashinfer._profiler.buffer import TRACK_WORDS, read

HERE = Path(__file__).parent
AROUND, WORD = 16, 0x5EED5EED5EED5EED


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("track") / "track"
    includes = [f"-I{HERE / 'on_cpu'}", f"-I{HERE.parents[1] / 'include'}"]
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", *includes, str(HERE / "track.cc"), "-o", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return place


def test_events_without_room_are_counted(program):
    """Read and dropped records add up to all records, whatever the size of the buffer."""
    for _ in range(6):
        blocks, threads, steps = random.randrange(1, 5), random.choice([128, 256, 300, 384]), random.randrange(6)
        groups = (threads + 127) // 128
        tracks, events = blocks * groups, blocks * (4 * steps + 4 + (groups - 1) * (2 * steps + 3))
        for room in (-4, -1, 0, 1, 2, random.randrange(3, 12), 100):
            size = 1 + tracks * (TRACK_WORDS + room) + random.randrange(tracks)
            arguments = [str(number) for number in (size, blocks, threads, steps)]
            words = subprocess.run([program, *arguments], capture_output=True, check=True).stdout
            memory = torch.frombuffer(bytearray(words), dtype=torch.int64)
            buffer = memory[AROUND:-AROUND]
            assert buffer.numel() == size and (memory[:AROUND] == WORD).all() and (memory[-AROUND:] == WORD).all()
            recording = read(buffer)
            assert (recording.blocks, recording.groups, recording.has_room) == (blocks, groups, room >= 0)
            if room < 0:
                assert (buffer[1:] == WORD).all()
                continue
            assert sum(len(track.records) for track in recording.tracks) + recording.dropped == events
            assert len(recording.tracks) == tracks
            assert (recording.dropped == 0) == (room >= 2 * steps + 4)
