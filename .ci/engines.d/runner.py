"""Runs scenarios on their pairs of servers, and says how each went."""
import contextlib
import fcntl
import signal
import sys
import time
import traceback

import faults
import flow
import pairs
import setup
from home import HOME, LOCK, LOGS, Problem
from trial import Failed, Trial

# Name, pair, function. Those of one pair follow each other; what restarts its servers comes last.
SCENARIOS = [
    ("basic", "whole", flow.basic),
    ("prefix", "cached", flow.prefix),
    ("preemption", "small", flow.preemption),
    ("tp-2-1", "tp-2-1", flow.tensor_parallel),
    ("tp-1-2", "tp-1-2", flow.tensor_parallel),
    ("layers", "layered", flow.layers),
    ("overlap", "chunked", flow.overlap),
    ("chunked", "chunked", flow.chunked),
    ("aborts", "chunked", faults.aborts),
    ("storm", "chunked", faults.storm),
    ("restarts", "chunked", faults.restarts),
]


def show():
    for name, pair, function in SCENARIOS:
        print(f"{name:<12}{function.__doc__}")
    return 0


def run(names, repeat):
    unknown = set(names) - {name for name, *_ in SCENARIOS}
    if unknown:
        raise SystemExit(f"engines: no scenario {', '.join(sorted(unknown))}; see .ci/engines list")
    chosen = [scenario for scenario in SCENARIOS if not names or scenario[0] in names]
    counted = {"passed": 0, "failed": 0, "skipped": 0}
    with ending_well():
        try:
            setup.ready()
        except Problem as problem:
            print(f"engines: {problem}")
            return 1
        for _ in range(repeat):
            for pair in dict.fromkeys(pair for _, pair, _ in chosen):
                mine = [(name, function) for name, its, function in chosen if its == pair]
                for outcome in on_pair(pair, mine):
                    counted[outcome] += 1
    print(f"engines: {', '.join(f'{count} {outcome}' for outcome, count in counted.items())}")
    return 1 if counted["failed"] or not counted["passed"] else 0


def on_pair(name, scenarios):
    """Starts a pair, runs its scenarios, ends it. Gives their outcomes."""
    logs = LOGS / f"{time.strftime('%m%d-%H%M%S')}-{name}"
    logs.mkdir(parents=True)
    with alone():
        available, needed = memory_gib(), pairs.MEMORY_GIB + (pairs.RANK_GIB if name.startswith("tp-") else 0)
        if available < needed:
            for scenario, _ in scenarios:
                print(f"{scenario}: skipped: its servers need {needed} GiB of memory, and {available:.1f} are free", flush=True)
                yield "skipped"
            return
        pair = pairs.make(name, logs)
        began = time.monotonic()
        try:
            try:
                pair.start()
            except Problem as problem:
                for scenario, _ in scenarios:
                    print(f"{scenario}: FAILED: its servers did not start: {problem}", flush=True)
                    yield "failed"
                return
            print(f"-- servers for {', '.join(scenario for scenario, _ in scenarios)}: up in {time.monotonic() - began:.0f} s, logs in {logs}", flush=True)
            for scenario, function in scenarios:
                yield one(scenario, function, pair)
        finally:
            pair.stop()


def one(name, function, pair):
    began = time.monotonic()
    try:
        for server in pair:
            if not server.alive():
                print(f"-- {server.name} is not running any more; starting it again", flush=True)
                server.stop()
                server.start()
                server.wait_ready()
        trial = Trial(pair, name)
        figures = function(trial)
        settle_s = trial.settled()
        trial.answers()
        trial.settled()
    except Exception as error:   # whatever it is, the scenarios after it have their turn
        print(f"{name}: FAILED after {time.monotonic() - began:.0f} s: {error}", flush=True)
        if not isinstance(error, Failed):
            traceback.print_exc(file=sys.stdout)
        for server in pair:
            print(server.tail(), flush=True)
        return "failed"
    print(f"{name}: ok in {time.monotonic() - began:.0f} s: {figures}; all blocks free in {settle_s:.1f} s", flush=True)
    return "passed"


def memory_gib():
    """What the system says can be used without swapping."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20


@contextlib.contextmanager
def alone():
    """One pair of servers on the machine at a time."""
    HOME.mkdir(parents=True, exist_ok=True)
    with open(LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"-- another test holds {LOCK}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def ending_well():
    """An interrupt or a request to end goes through every `finally`, so that no server stays."""
    def end(number, _):
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
