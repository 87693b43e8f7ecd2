"""The scheduler side: what is decided per request. No endpoint lives here and nothing blocks.

A prefill request (``do_remote_decode``)::

    known --first chunk--> OFFERED --more chunks--> OFFERED --last chunk--> COMPLETE --request_finished--> SENDING
      |                      | ^                                               |                             |
      |                      | preempted: appended = 0, all chunks again       |                             reported as
      |                      v                                                 v                             sent: gone
      aborted: opened and cancelled at once, so that a waiting claim hears of it; with blocks: SENDING until fenced

A decode request (``do_remote_prefill``)::

    KNOWN (claim open) --blocks--> FILLED --reported as received, or failed--> gone
      |                              |
      |                              aborted: the claim is cancelled, the blocks stay until it is fenced and reported
      finished before it had blocks, or needs nothing: declined, gone, never reported

Gone means that vLLM may ask again (a preempted request, a load that failed and is recomputed) and hears that nothing
is to be loaded. The races that matter:

* abort before, in or after the step that allocates: the messages of one step are done in the order open, fill, decline,
  abort, so each of them finds its claim;
* abort after the worker has reported but before vLLM has heard: the worker knows the id no more and ignores it;
* a claim that ends before it is filled (prefill restarted, offer retracted): the worker keeps the reason and reports
  the failure when the blocks come, since vLLM has no use for a report before;
* preemption of a decode request: it is past its load, whose blocks are gone: it recomputes;
* preemption of a prefill request between steps: `StepMessages.preempted` is done before the forward that may overwrite
  its blocks; what it appends afterwards is a new attempt;
* the same key twice at a time: the second prefill request is not offered, with an error in the log.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from . import params as keys
from .engine import logger_of
from .messages import (
    ClaimFill,
    ClaimOpen,
    ClaimRefuse,
    Handshake,
    OfferEnd,
    OfferStep,
    StepMessages,
)
from .settings import Settings
from .stats import Counters, KvxferStats
from .tables import Tables

logger = logger_of("kvxfer")

#: Ends after which a request's KV is not wanted, by the names of vLLM's `RequestStatus`.
_ABANDONED = frozenset({"FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED"})


@dataclass
class Send:
    """A prefill request."""

    request: Any
    key: str
    readers: int
    #: Tokens that are handed over: the prompt.
    total: int
    #: The workers have been told of it.
    opened: bool = False
    #: Tokens appended in the current attempt.
    appended: int = 0
    #: Its end was told, and is to be reported.
    ending: bool = False


class LoadState(Enum):
    """Where a decode request stands."""

    KNOWN = "known"
    FILLED = "filled"


@dataclass
class Load:
    """A decode request."""

    key: str
    state: LoadState = LoadState.KNOWN
    #: Why it can only fail.
    refused: str | None = None


class Scheduler:
    """Turns what vLLM's scheduler does into messages for the workers."""

    def __init__(self, settings: Settings, tables: Tables, engine_id: str, offers: bool = True):
        """`offers`: whether this server's KV can be claimed."""
        self.settings = settings
        self.offers = offers
        self.tables = tables
        self.engine_id = engine_id
        self.addresses: list[str] = []
        self.counters = Counters()
        self._sends: dict[str, Send] = {}
        self._keys: dict[str, str] = {}  # of live sends: key -> request id
        self._loads: dict[str, Load] = {}
        self._next = StepMessages()

    # ------------------------------------------------------------------------------------------ at the start

    def set_addresses(self, handshakes: dict[tuple[int, int], Handshake]) -> None:
        """What the workers said, by (pipeline rank, tensor rank)."""
        ordered = [handshakes[rank] for rank in sorted(handshakes)]
        self.addresses = [handshake.address for handshake in ordered]
        if not self.offers:
            return
        logger.info(
            "kvxfer: engine %s can be claimed from, remote_addresses %s; layout: %s",
            self.engine_id,
            json.dumps(self.addresses),
            ordered[0].layout if ordered else "none",
        )
        if self.settings.address_file:
            _write_whole(
                self.settings.address_file.replace("{engine_id}", self.engine_id),
                json.dumps(keys.description(self.addresses, self.engine_id)) + "\n",
            )

    # ------------------------------------------------------------------------------------- requests come and go

    def on_new_request(self, request: Any) -> None:
        """A request came. Never raises: a bad request must not end the engine."""
        request_id, params = request.request_id, request.kv_transfer_params
        try:
            prefill = keys.prefill_params(params, request_id)
        except keys.ParamsError as error:
            self.counters.add("refused_params")
            logger.error("kvxfer: %s: not offered: %s", request_id, error)
            prefill = None
        if prefill is not None:
            self._new_send(request, prefill)
        try:
            decode = keys.decode_params(params)
        except keys.ParamsError as error:
            # It was meant to be loaded. vLLM's policy for failed loads decides what becomes of it.
            self.counters.add("refused_params")
            self._loads[request_id] = Load("", refused=str(error))
            return
        if decode is not None:
            self._loads[request_id] = Load(decode.key)
            self._next.claims.append(
                ClaimOpen(
                    request_id,
                    decode.key,
                    decode.addresses,
                    keys.claim_set(self.engine_id, request_id),
                )
            )

    def _new_send(self, request: Any, prefill: keys.PrefillParams) -> None:
        holder = self._keys.get(prefill.key)
        if holder is not None:
            self.counters.add("duplicate_keys")
            logger.error(
                "kvxfer: %s: not offered: transfer_id %r is in use by %s; give each request its own",
                request.request_id,
                prefill.key,
                holder,
            )
            return
        self._keys[prefill.key] = request.request_id
        self._sends[request.request_id] = Send(request, prefill.key, prefill.readers, request.num_prompt_tokens)

    def tokens_to_load(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens beyond `computed` come from prefill, and that they come between steps."""
        load = self._loads.get(request.request_id)
        if load is None or load.state is not LoadState.KNOWN:
            return 0, False
        # The last prompt token is computed here in any case, to sample from it: alone it is not worth a transfer.
        if request.num_prompt_tokens - 1 - computed <= 0:
            return 0, False
        return request.num_prompt_tokens - computed, True

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """A request has blocks; `external` of its tokens are to be loaded."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is None or load.state is not LoadState.KNOWN:
            return
        total = request.num_prompt_tokens
        if external <= 0:
            self.counters.add("full_prefix_hits")
            self.counters.add("tokens_skipped", total)
            self._decline(request_id)
            return
        load.state = LoadState.FILLED
        first = total - external
        self.counters.add("tokens_skipped", first)
        self.counters.add("tokens_to_load", external)
        if load.refused is not None:
            self._next.refusals.append(ClaimRefuse(request_id, load.refused))
            return
        try:
            groups = self.tables.claimed(tables, first, total)
        except ValueError as error:
            # Unknown to the workers as a load; the claim is declined and the failure reported.
            self._next.declines.append(request_id)
            self._next.refusals.append(ClaimRefuse(request_id, str(error)))
            return
        self._next.fills.append(ClaimFill(request_id, groups))

    def _decline(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        if load.refused is None:
            self._next.declines.append(request_id)

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Whether its blocks are kept until it is reported, and what the client gets."""
        request_id = request.request_id
        load = self._loads.get(request_id)
        if load is not None:
            if load.state is LoadState.KNOWN:
                self._decline(request_id)
            else:
                # vLLM keeps the blocks of a request that waits for its load, until it is reported.
                self._next.claim_aborts.append(request_id)
                del self._loads[request_id]
        send = self._sends.get(request_id)
        if send is not None:
            return self._end_send(request_id, send, request.status.name)
        if keys.wants_description(request.kv_transfer_params):
            return False, keys.description(self.addresses, self.engine_id)
        return False, None

    def _end_send(self, request_id: str, send: Send, status: str) -> tuple[bool, dict[str, Any] | None]:
        complete = send.appended >= send.total and status not in _ABANDONED
        # Without blocks there is nothing to wait for, and vLLM would find nothing to free.
        holds = send.appended > 0
        self._next.offer_ends.append(OfferEnd(request_id, send.key, cancel=not complete, report=holds))
        if holds:
            send.ending = True
        else:
            self._forget(request_id, send)
        if not complete:
            return holds, None
        return holds, keys.answer(send.key, self.addresses, self.engine_id, send.total)

    def _forget(self, request_id: str, send: Send) -> None:
        self._sends.pop(request_id, None)
        self._keys.pop(send.key, None)

    # ---------------------------------------------------------------------------------------------- each step

    def step(self, output: Any) -> StepMessages:
        """The messages that go with a step."""
        messages, self._next = self._next, StepMessages()
        if self._sends:
            self._take_back(output, messages)
            self._offer(output, messages)
        return messages

    def _take_back(self, output: Any, messages: StepMessages) -> None:
        for request_id in output.preempted_req_ids or ():
            send = self._sends.get(request_id)
            if send is not None and not send.ending and send.appended > 0:
                send.appended = 0
                messages.preempted.append(request_id)

    def _offer(self, output: Any, messages: StepMessages) -> None:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            send = self._sends.get(request_id)
            if send is None or send.ending:
                continue
            # vLLM advances num_computed_tokens after this call.
            computed = send.request.num_computed_tokens + scheduled
            end = self.tables.complete_end(computed, send.total)
            step = OfferStep(request_id, send.key, send.readers, None, None, None)
            if end > send.appended:
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                step.append = self.tables.offered(tables, send.appended, end, send.total)
                step.ready = (send.appended, end)
                if end >= send.total:
                    step.finish = send.total
                send.appended = end
            elif send.opened:
                continue
            send.opened = True
            messages.offers.append(step)

    def reported(self, sent: set[str], received: set[str]) -> None:
        """What the workers reported, all ranks together."""
        for request_id in sent:
            send = self._sends.get(request_id)
            if send is not None:
                self._forget(request_id, send)
        for request_id in received:
            self._loads.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether the engine must go on stepping although no request runs."""
        return not self._next.is_empty() or any(send.ending for send in self._sends.values())

    def take_stats(self) -> KvxferStats | None:
        """What was counted since the last call."""
        return self.counters.take()


def _write_whole(path: str, text: str) -> None:
    """A reader sees the old file or the new one, never half of it."""
    directory = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".kvxfer-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
