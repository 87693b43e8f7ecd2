"""What the tests share: endpoints that are closed again, and second processes."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvxfer

HERE = Path(__file__).parent
WAIT = 30.0  # an upper bound for what takes milliseconds on an idle machine


def make(name="test", **settings):
    settings.setdefault("listen", "127.0.0.1:0")
    settings.setdefault("transports", ["tcp"])
    return kvxfer.Endpoint(name, **settings)


@pytest.fixture
def endpoint():
    """Makes endpoints; closes them after the test."""
    made = []

    def factory(name="test", **settings):
        made.append(make(name, **settings))
        return made[-1]

    yield factory
    for one in made:
        try:
            one.close()
        except kvxfer.DeadlineExceeded:
            pass


@pytest.fixture
def pair(endpoint):
    """A prefill and a decode endpoint."""
    return endpoint("prefill"), endpoint("decode")


class Worker:
    """A second Python process that runs one of `workers.py`'s functions and talks in lines."""

    def __init__(self, name, *arguments, env=None):
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "workers.py"), name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    @property
    def pid(self):
        return self.process.pid

    def says(self):
        line = self.process.stdout.readline()
        assert line, f"the worker ended with {self.process.wait(WAIT)}"
        return line.rstrip("\n")

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ends(self):
        return self.process.wait(WAIT)

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT)


@pytest.fixture
def worker():
    """Starts workers; kills what is left of them after the test."""
    started = []

    def start(name, *arguments, **options):
        started.append(Worker(name, *arguments, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.kill()
        one.process.stdin.close()
        one.process.stdout.close()


def until(condition, what, seconds=WAIT):
    """Waits for a condition that nothing tells of."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def collect():
    """Collects what is unreachable, and gives back what other threads dropped."""
    for _ in range(3):
        gc.collect()
