"""The examples run and say what the documentation shows."""

import subprocess
import sys

from conftest import HERE, WAIT


def run(name):
    command = [sys.executable, "-W", "error", str(HERE.parent / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_handover():
    said = run("handover.py")
    # Two processes write to one pipe, and an unbuffered line is two writes: lines may run into one another.
    for line in (
        "decode: 1638400 bytes arrived",
        "decode: every token is right",
        "prefill: released, arrived; the blocks may be reused",
    ):
        assert line in said


def test_await_many():
    assert run("await_many.py").splitlines() == ["100 requests, 25 MiB", "100 ended, says the event queue"]
