"""kvxfer.vllm: a hybrid model, full attention and a sliding window whose caches overlay each other, between real
endpoints, with the scheduler side in front of the workers."""

import time
from types import SimpleNamespace

import pytest

from kvxfer.vllm.layout import CacheLayout, GroupSpec, view_of
from kvxfer.vllm.scheduler import Scheduler
from kvxfer.vllm.settings import Settings
from kvxfer.vllm.tables import GroupTable, Tables
from kvxfer.vllm.records import Place
from kvxfer.vllm.worker import Worker

np = pytest.importorskip("numpy", reason="numpy is not installed: arrays are not tested")
pytest.importorskip("kvxfer._kvxfer", reason="needs the built package")

BLOCK, WINDOW, HEADS, DIM, BLOCKS = 16, 40, 2, 4, 32
FULL, SLIDING = ("layers.0", "layers.2"), ("layers.1", "layers.3")
SOON = 20.0


class Server:
    """A scheduler side and one worker over memory that both groups use."""

    def __init__(self, role):
        self.memory = np.full((2, BLOCKS, HEADS, BLOCK, 2 * DIM), -1, np.float32)
        self.tensors = {name: self.memory[index] for layers in (FULL, SLIDING) for index, name in enumerate(layers)}
        groups = [
            GroupSpec("attention-0", "attention", "f32", BLOCK, HEADS, DIM, DIM, FULL),
            GroupSpec("window-1", "attention", "f32", BLOCK, HEADS, DIM, DIM, SLIDING, window=WINDOW),
        ]
        self.worker = Worker(Settings(), Place(), role, role)
        self.worker.register(CacheLayout(groups, {name: view_of(one) for name, one in self.tensors.items()}))
        tables = Tables((GroupTable(0, BLOCK), GroupTable(1, BLOCK, WINDOW)))
        self.side = Scheduler(Settings(), tables, role)
        self.side.set_addresses({(0, 0): self.worker.handshake()})

    def step(self, scheduled=None, table=None):
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled or {},
            preempted_req_ids=None,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: table),
        )
        step = self.side.step(output)
        self.worker.take_back(step.preempted)
        self.worker.begin_step(step)
        self.worker.end_step(step)
        reports = self.worker.results()
        self.side.reported(reports.sent, reports.received)
        return reports


def request(name, tokens, **params):
    return SimpleNamespace(request_id=name, num_prompt_tokens=tokens, num_computed_tokens=0, kv_transfer_params=params)


@pytest.mark.parametrize("held", [0, 32])
def test_a_hybrid_prompt(held):
    prefill, decode = Server("serve"), Server("receive")
    try:
        tokens = 100  # Token 100 looks back to 61: block 3 begins at 48.
        full, sliding = list(range(1, 8)), [0, 0, 0, 20, 21, 22, 23]
        mine, my_sliding = list(range(15, 8, -1)), [0, 0, 0, 30, 29, 28, 27]
        rng = np.random.default_rng(1)
        kv = {name: rng.random((tokens, HEADS, 2 * DIM), np.float32) for name in FULL + SLIDING}
        for layers, table in ((FULL, full), (SLIDING, sliding)):
            for name in layers:
                for token in range(tokens):
                    if table[token // BLOCK]:
                        prefill.tensors[name][table[token // BLOCK], :, token % BLOCK] = kv[name][token]
        one = request("p", tokens, do_remote_decode=True, transfer_id="t")
        prefill.side.on_new_request(one)
        two = request(
            "d", tokens, do_remote_prefill=True, transfer_id="t", remote_addresses=prefill.side.addresses
        )
        decode.side.on_new_request(two)
        external, _ = decode.side.tokens_to_load(two, held)
        decode.side.allocated(two, (mine, my_sliding), external)
        decode.step()
        prefill.step({"p": 50}, (full, sliding))
        one.num_computed_tokens = 50
        prefill.step({"p": 50}, (full, sliding))
        deadline = time.monotonic() + SOON
        received = set()
        while not received:
            assert time.monotonic() < deadline
            reports = decode.step()
            received |= reports.received
            assert not reports.failed
        for layers, table, first in ((FULL, mine, held), (SLIDING, my_sliding, max(held, 48))):
            for name in layers:
                for token in range(first, tokens):
                    got = decode.tensors[name][table[token // BLOCK], :, token % BLOCK]
                    assert (got == kv[name][token]).all(), (name, token)
        untouched = set(range(BLOCKS)) - set(mine[held // BLOCK :]) - set(my_sliding)
        assert (decode.memory[:, sorted(untouched)] == -1).all()
    finally:
        prefill.worker.close()
        decode.worker.close()
