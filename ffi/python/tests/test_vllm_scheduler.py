"""kvxfer.vllm, the scheduler side, against simple stand-ins for vLLM's requests and steps."""

import json
from types import SimpleNamespace

import pytest

from kvxfer.vllm.messages import Handshake
from kvxfer.vllm.scheduler import Scheduler
from kvxfer.vllm.settings import Settings
from kvxfer.vllm.tables import GroupTable, Tables

BLOCK = 32


class Engine:
    """As much of vLLM's scheduler as the hooks see."""

    def __init__(self, window=None, **settings):
        groups = [GroupTable(0, BLOCK)]
        if window:
            groups.append(GroupTable(1, BLOCK, window))
        self.side = Scheduler(Settings.parse(settings), Tables(tuple(groups)), "engine-0")
        self.side.addresses = ["address-0"]
        self.tables = {}
        self.next_block = 1

    def request(self, name, tokens, **params):
        request = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            kv_transfer_params=params or None,
            status=SimpleNamespace(name="RUNNING"),
        )
        self.side.on_new_request(request)
        return request

    def blocks(self, request, tokens):
        table = self.tables.setdefault(request.request_id, [])
        while len(table) * BLOCK < tokens:
            table.append(self.next_block)
            self.next_block += 1
        return table

    def step(self, scheduled=(), preempted=()):
        """One step: requests with the tokens scheduled for each."""
        scheduled = dict((request.request_id, (request, tokens)) for request, tokens in scheduled)
        for request, tokens in scheduled.values():
            self.blocks(request, request.num_computed_tokens + tokens)
        for request in preempted:
            request.num_computed_tokens = 0
            self.tables.pop(request.request_id, None)
        state = SimpleNamespace(get_block_ids=lambda name: (self.tables[name], self.tables[name]))
        output = SimpleNamespace(
            num_scheduled_tokens={name: tokens for name, (_, tokens) in scheduled.items()},
            preempted_req_ids={request.request_id for request in preempted},
            kv_connector_block_state=state,
        )
        messages = self.side.step(output)
        for request, tokens in scheduled.values():
            request.num_computed_tokens += tokens
        return messages

    def finish(self, request, status="FINISHED_LENGTH_CAPPED"):
        request.status = SimpleNamespace(name=status)
        return self.side.finished(request)

    def load(self, request, held=0):
        """What vLLM does when it admits a request of which it holds `held` tokens."""
        external, between = self.side.tokens_to_load(request, held)
        assert between == (external > 0)
        table = self.blocks(request, request.num_prompt_tokens)
        self.side.allocated(request, (table, table), external)
        return external


def prefill(**more):
    return {"do_remote_decode": True, **more}


def decode(key="t-1"):
    return {"do_remote_prefill": True, "transfer_id": key, "remote_addresses": ["address-9"]}


# ------------------------------------------------------------------------------------------------- prefill


def test_a_short_prefill_is_one_part():
    engine = Engine()
    request = engine.request("p", 40, **prefill())
    assert engine.step().is_empty()
    (offer,) = engine.step([(request, 40)]).offers
    assert (offer.key, offer.ready, offer.finish) == ("p", (0, 40), 40)
    assert offer.append == [(0, 40, [1, 2])]
    keep, answer = engine.finish(request)
    assert keep and answer["transfer_id"] == "p" and answer["remote_addresses"] == ["address-0"]
    assert answer["do_remote_prefill"] is True and answer["do_remote_decode"] is False
    assert engine.side.has_work()
    (end,) = engine.step().offer_ends
    assert (end.cancel, end.report) == (False, True)
    assert engine.side.has_work()
    engine.side.reported({"p"}, set())
    assert not engine.side.has_work()


def test_chunks_release_whole_blocks_and_the_last_one_the_rest():
    engine = Engine()
    request = engine.request("p", 100, **prefill(transfer_id="t-1"))
    parts = []
    for tokens in (10, 30, 30, 30):
        (offer,) = engine.step([(request, tokens)]).offers
        parts.append((offer.append, offer.ready, offer.finish))
    assert parts == [
        (None, None, None),
        ([(0, 32, [1])], (0, 32), None),
        ([(32, 64, [2])], (32, 64), None),
        ([(64, 100, [3, 4])], (64, 100), 100),
    ]
    # Steps that only generate say nothing more.
    assert engine.step([(request, 1)]).offers == []


def test_a_step_that_completes_no_block_is_not_told_twice():
    engine = Engine()
    request = engine.request("p", 100, **prefill())
    assert len(engine.step([(request, 5)]).offers) == 1
    assert engine.step([(request, 5)]).is_empty()


def test_preemption_takes_the_blocks_back_and_appends_anew():
    engine = Engine()
    request = engine.request("p", 100, **prefill())
    engine.step([(request, 64)])
    messages = engine.step(preempted=[request])
    assert messages.preempted == ["p"] and messages.offers == []
    (offer,) = engine.step([(request, 100)]).offers
    assert offer.append == [(0, 100, [3, 4, 5, 6])] and offer.ready == (0, 100)


def test_a_request_preempted_and_resumed_in_one_step_is_taken_back_first():
    engine = Engine()
    request = engine.request("p", 64, **prefill())
    engine.step([(request, 32)])
    request.num_computed_tokens = 0
    engine.tables.pop("p")
    engine.blocks(request, 64)
    state = SimpleNamespace(get_block_ids=lambda name: (engine.tables[name],))
    output = SimpleNamespace(
        num_scheduled_tokens={"p": 64}, preempted_req_ids={"p"}, kv_connector_block_state=state
    )
    messages = engine.side.step(output)
    assert messages.preempted == ["p"] and messages.offers[0].append[0].first == 0


def test_a_preempted_prefill_that_is_aborted_holds_nothing():
    engine = Engine()
    request = engine.request("p", 100, **prefill())
    engine.step([(request, 64)])
    engine.step(preempted=[request])
    assert engine.finish(request, "FINISHED_ABORTED") == (False, None)
    (end,) = engine.step().offer_ends
    assert (end.cancel, end.report) == (True, False)
    assert not engine.side.has_work()


def test_an_aborted_prefill_keeps_its_blocks_until_they_are_fenced():
    engine = Engine()
    request = engine.request("p", 100, **prefill())
    engine.step([(request, 64)])
    keep, answer = engine.finish(request, "FINISHED_ABORTED")
    assert keep and answer is None
    (end,) = engine.step().offer_ends
    assert (end.cancel, end.report) == (True, True)


def test_abort_after_the_last_chunk_was_scheduled_hands_nothing_over():
    engine = Engine()
    request = engine.request("p", 64, **prefill())
    engine.step([(request, 64)])
    keep, answer = engine.finish(request, "FINISHED_ABORTED")
    assert keep and answer is None and engine.step().offer_ends[0].cancel


def test_a_prefill_aborted_before_it_started_is_told_so_that_claims_hear_of_it():
    engine = Engine()
    request = engine.request("p", 64, **prefill(transfer_id="t-1"))
    assert engine.finish(request, "FINISHED_ABORTED") == (False, None)
    assert engine.side.has_work()
    (end,) = engine.step().offer_ends
    assert (end.key, end.cancel, end.report) == ("t-1", True, False)
    assert not engine.side.has_work()


def test_a_key_in_use_is_not_offered_twice(caplog):
    engine = Engine()
    first = engine.request("p-0", 64, **prefill(transfer_id="t-1"))
    second = engine.request("p-1", 64, **prefill(transfer_id="t-1"))
    messages = engine.step([(first, 64), (second, 64)])
    assert [offer.request_id for offer in messages.offers] == ["p-0"]
    assert engine.finish(second) == (False, None)
    engine.finish(first)
    engine.side.reported({"p-0"}, set())
    again = engine.request("p-2", 64, **prefill(transfer_id="t-1"))
    assert len(engine.step([(again, 64)]).offers) == 1
    assert engine.side.take_stats().data["duplicate_keys"] == 1


def test_bad_parameters_of_a_prefill_are_not_offered():
    engine = Engine()
    request = engine.request("p", 64, **prefill(transfer_id=5))
    assert engine.step([(request, 64)]).is_empty()
    assert engine.finish(request) == (False, None)
    assert engine.side.take_stats().data["refused_params"] == 1


def test_window_groups_hand_over_what_they_still_hold_at_the_end():
    engine = Engine(window=64)
    request = engine.request("p", 200, **prefill())
    assert engine.step([(request, 100)]).offers[0].append is None
    (offer,) = engine.step([(request, 100)]).offers
    assert offer.ready == (0, 200) and offer.finish == 200
    full, window = offer.append
    assert (full.first, full.end, len(full.blocks)) == (0, 200, 7)
    # Token 200 looks back to 137: block 4 begins at 128.
    assert (window.first, window.end, window.blocks) == (128, 200, full.blocks[4:])


def test_describe_gives_the_addresses_and_offers_nothing():
    engine = Engine()
    request = engine.request("p", 10, describe=True)
    assert engine.step([(request, 10)]).is_empty()
    keep, answer = engine.finish(request)
    assert not keep and answer["remote_addresses"] == ["address-0"]


# -------------------------------------------------------------------------------------------------- decode


def test_a_claim_is_opened_when_the_request_is_known_and_filled_when_it_has_blocks():
    engine = Engine()
    request = engine.request("d", 100, **decode())
    messages = engine.step()
    (claim,) = messages.claims
    assert (claim.key, claim.addresses) == ("t-1", ("address-9",)) and messages.fills == []
    assert engine.load(request) == 100
    (fill,) = engine.step().fills
    assert fill.groups == [(0, 100, [1, 2, 3, 4])]
    engine.side.reported(set(), {"d"})
    # Asked again (second allocation, preemption, recomputation): nothing to load.
    assert engine.side.tokens_to_load(request, 0) == (0, False)
    assert engine.load(request) == 0
    assert engine.step().is_empty()


def test_only_tokens_that_are_not_held_are_selected():
    engine = Engine()
    request = engine.request("d", 100, **decode())
    assert engine.load(request, held=64) == 36
    messages = engine.step()
    assert len(messages.claims) == 1
    assert messages.fills[0].groups == [(64, 100, [3, 4])]
    data = engine.side.take_stats().data
    assert (data["tokens_skipped"], data["tokens_to_load"]) == (64, 36)


def test_a_full_prefix_hit_is_declined_and_never_reported():
    engine = Engine()
    request = engine.request("d", 65, **decode())
    assert engine.load(request, held=64) == 0
    messages = engine.step()
    assert messages.declines == ["d"] and messages.fills == []
    assert engine.finish(request) == (False, None)
    assert engine.step().is_empty()
    assert engine.side.take_stats().data["full_prefix_hits"] == 1


def test_a_request_that_ends_before_it_has_blocks_is_declined():
    engine = Engine()
    early = engine.request("d-0", 100, **decode("t-0"))
    assert engine.finish(early, "FINISHED_ABORTED") == (False, None)
    messages = engine.step()
    # Opened and declined in one step: prefill is to hear of it.
    assert [claim.key for claim in messages.claims] == ["t-0"] and messages.declines == ["d-0"]
    late = engine.request("d-1", 100, **decode("t-1"))
    engine.step()
    engine.finish(late, "FINISHED_ABORTED")
    assert engine.step().declines == ["d-1"]


def test_a_waiting_request_that_is_aborted_is_cancelled_once():
    engine = Engine()
    request = engine.request("d", 100, **decode())
    engine.load(request)
    engine.step()
    engine.finish(request, "FINISHED_ABORTED")
    assert engine.step().claim_aborts == ["d"]
    assert engine.step().is_empty()
    engine.side.reported(set(), {"d"})


def test_abort_in_the_step_that_allocates_comes_after_the_fill():
    engine = Engine()
    request = engine.request("d", 100, **decode())
    engine.load(request)
    engine.finish(request, "FINISHED_ABORTED")
    messages = engine.step()
    assert len(messages.claims) == len(messages.fills) == 1 and messages.claim_aborts == ["d"]


def test_abort_after_the_report_says_nothing():
    engine = Engine()
    request = engine.request("d", 100, **decode())
    engine.load(request)
    engine.step()
    engine.side.reported(set(), {"d"})
    engine.finish(request, "FINISHED_ABORTED")
    assert engine.step().is_empty()


@pytest.mark.parametrize("missing", ["transfer_id", "remote_addresses"])
def test_unusable_parameters_fail_the_load_so_that_vllms_policy_applies(missing):
    engine = Engine()
    params = decode()
    del params[missing]
    request = engine.request("d", 100, **params)
    assert engine.load(request) == 100
    messages = engine.step()
    assert messages.claims == messages.fills == []
    (refusal,) = messages.refusals
    assert missing in refusal.why


def test_unusable_parameters_of_a_request_that_needs_nothing_are_no_failure():
    engine = Engine()
    request = engine.request("d", 65, do_remote_prefill=True)
    assert engine.load(request, held=64) == 0
    assert engine.step().is_empty()


def test_two_requests_with_the_same_parameters_claim_in_sets_of_their_own():
    engine = Engine()
    engine.request("0_d", 100, **decode())
    engine.request("1_d", 100, **decode())
    one, two = engine.step().claims
    assert one.set != two.set


def test_what_was_loaded_can_be_handed_on():
    engine = Engine()
    request = engine.request("b", 64, **decode("t-1"), **prefill())
    assert engine.load(request) == 64
    engine.step()
    engine.side.reported(set(), {"b"})
    request.num_computed_tokens = 63
    (offer,) = engine.step([(request, 1)]).offers
    assert offer.append == [(0, 64, [1, 2])] and offer.finish == 64
    keep, answer = engine.finish(request)
    assert keep and answer["do_remote_prefill"]


def test_addresses_are_ordered_by_rank_and_written_whole(tmp_path):
    path = tmp_path / "addresses.json"
    engine = Engine(address_file=str(path))
    engine.side.set_addresses({(0, 1): Handshake("b", "l"), (0, 0): Handshake("a", "l"), (1, 0): Handshake("c", "l")})
    assert engine.side.addresses == ["a", "b", "c"]
    assert json.loads(path.read_text())["remote_addresses"] == ["a", "b", "c"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["addresses.json"]
