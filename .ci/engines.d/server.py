"""A real `vllm serve`, started, watched and ended here."""
import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time

import client
import setup
from home import HOME, MODEL, SITE, VENV, Problem

START_LIMIT_S = 300
STOP_LIMIT_S = 30
# What nobody comes for ends after this time, not after minutes: scenarios wait for all to be given back.
PATIENCE_S = 30
# Two servers, and whatever else a machine does, on a few cores: a living process may be kept from running for seconds.
LIVENESS_S = 10
PR_SET_PDEATHSIG = 1
# Warnings of vLLM's start that say nothing about a failure.
NOISE = ("ulimit", "enforce eager", "Enforce eager", "Inductor", "Triton", "SSM cache", "FutureWarning", "experimental", "shm_broadcast")
libc = ctypes.CDLL(None)


class Server:
    """One instance: its API server, its engine and its workers, which are one process group."""

    def __init__(self, name, role, connector, flags, logs):
        self.name, self.role, self.connector, self.flags, self.logs = name, role, connector, flags, logs
        self.port, self.side_port = free_port(), free_port()
        self.process, self.starts = None, 0

    def start(self):
        """Starts it and returns at once; `wait_ready` waits. To be called from the main thread, whose end ends the server."""
        self.starts += 1
        self.log = self.logs / f"{self.name}-{self.starts}.log"
        command = [
            VENV / "bin" / "vllm", "serve", MODEL, "--served-model-name", client.MODEL_NAME, "--host", "127.0.0.1", "--port", self.port,
            "--dtype", "float32", "--enforce-eager", "--max-num-seqs", 16, "--kv-transfer-config", json.dumps(self.transfer_config())]
        command += self.flags
        parent = os.getpid()

        def end_with_us():
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        with open(self.log, "w") as log:
            self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.logs,
                                            env=self.variables(), start_new_session=True, preexec_fn=end_with_us)
        self.usage_idle = None

    def transfer_config(self):
        config = {"kv_connector": self.connector.name, "kv_role": self.role, "kv_buffer_device": "cpu", "engine_id": f"{self.name}-{self.starts}",
                  "kv_load_failure_policy": self.connector.policy}
        if self.connector.module:
            config["kv_connector_module_path"] = self.connector.module
        if self.connector.extra:
            config["kv_connector_extra_config"] = self.connector.extra
        return config

    def variables(self):
        ours = dict(
            VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", PYTHONHASHSEED="0",
            HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
            VLLM_HOST_IP="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1", VLLM_NIXL_SIDE_CHANNEL_PORT=str(self.side_port),
            UCX_TLS="tcp,cma,posix,sysv,self", PYTHONPATH=f"{SITE}:{pathlib.Path(__file__).parent / 'calm'}")
        return {**setup.clean(), **ours, **self.connector.variables}

    def wait_ready(self):
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self.process.poll() is not None:
                raise Problem(f"{self.name} ended with status {self.process.returncode} while it started:\n{self.tail()}")
            try:
                client.get(self.port, "/health", timeout=2)
                break
            except OSError:
                time.sleep(0.3)
        else:
            raise Problem(f"{self.name} was not ready after {START_LIMIT_S} s:\n{self.tail()}")
        # The first request of its life takes seconds, in which an offer made to it might pass its deadline.
        client.complete(self, list(range(1, 200)), 2)

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def kill(self):
        """As a crash or a lost machine does it: all its processes at once, without a word."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_LIMIT_S)
        self.wait_gone()

    def stop(self):
        if self.process is None:
            return
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                pass
        # Its engine and workers normally end with it.
        if not self.wait_gone(limit_s=5, must=False):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait(STOP_LIMIT_S)
            self.wait_gone()
        self.process = None

    def wait_gone(self, limit_s=STOP_LIMIT_S, must=True):
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            if not members(self.process.pid):
                return True
            time.sleep(0.1)
        if must:
            raise Problem(f"processes of {self.name} are still there after {limit_s} s: {members(self.process.pid)}")
        return False

    def workers(self):
        """The processes that hold the KV cache and run the connector's worker side."""
        found = [pid for pid in members(self.process.pid) if "Worker" in title(pid)]
        if not found:
            raise Problem(f"{self.name} has no worker processes")
        return found

    def tail(self, lines=25):
        text = self.log.read_text(errors="replace").splitlines()
        wrong = [line for line in text if any(word in line for word in ("ERROR", "Error:", "Traceback", "panicked", "WARNING")) and not any(word in line for word in NOISE)]
        shown = (wrong[-lines:] or text[-lines:])
        return "\n".join(f"    {self.name}| {line[:300]}" for line in shown)


class Stopped:
    """Processes that do not run for a while. They are let go in every case."""

    def __init__(self, pids):
        self.pids = pids

    def __enter__(self):
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        return self

    def __exit__(self, *_):
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass


class Connector:
    def __init__(self, name, module=None, policy="fail", extra=None, variables=None):
        self.name, self.module, self.policy, self.extra, self.variables = name, module, policy, extra, variables or {}


def kvxfer(policy="fail", **extra):
    return Connector("KvxferConnector", "kvxfer.vllm", policy, {"unclaimed_seconds": PATIENCE_S, "unserved_seconds": PATIENCE_S, **extra},
                     {"KVXFER_DEADLINES_UNMATCHED_MS": str(1000 * PATIENCE_S), "KVXFER_DEADLINES_LIVENESS_MS": str(1000 * LIVENESS_S)})


def with_listen(connector, address):
    """The same, listening at this address if it is kvxfer's; a second worker takes the next port."""
    if not connector.module:
        return connector
    return Connector(connector.name, connector.module, connector.policy, dict(connector.extra, listen=address), connector.variables)


def nixl():
    return Connector("NixlConnector")


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, prefill, decode):
        self.prefill, self.decode = prefill, decode

    def __iter__(self):
        return iter((self.prefill, self.decode))

    def start(self):
        for server in self:
            server.start()
        for server in self:
            server.wait_ready()

    def stop(self):
        # Both at once: each takes seconds.
        ends = [threading.Thread(target=server.stop) for server in self]
        for end in ends:
            end.start()
        for end in ends:
            end.join()


def members(group):
    """Living processes of a process group."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state not in "ZX":
                found.append(int(entry.name))
    return found


def title(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
