"""For servers with several ranks on a few cores: vLLM's ranks wait for each other by yielding in a loop.

Kernels that charge a yield with the rest of the slice let such loops keep the other server, and kvxfer's own threads, from
running for tens of seconds. Here they sleep for a moment instead.
"""

import os
import time


def _sleep() -> None:
    time.sleep(50e-6)


os.sched_yield = _sleep
