"""The worker side: one endpoint and one pool per worker, offers and claims of its requests.

Calls here return at once, but for `take_back`, which waits for reads of preempted blocks, at most `preemption_wait_ms`.
An offer (prefill)::

    OPEN --parts--> OPEN --finish--> OPEN --ended event--> ENDED --+--> reported as sent, once, if the scheduler asked
                     | ^                                           |
                     +-+ preempted: restarted, and waited for      +--> forgotten, if it did not

A claim (decode)::

    OPEN --fill--> FILLED --ended event--> reported as received, once; as failed too, if it failed and was not aborted
     |  \
     |   ended event: FAILED --blocks come--> reported as received and failed, once
     decline: forgotten, never reported

A handle is kept until its ended event has come, whatever the scheduler has forgotten meanwhile: only then is it known
that nothing is read from, or written to, its blocks.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import kvxfer

from .engine import logger_of
from .layout import CacheLayout
from .messages import ClaimFill, ClaimOpen, ClaimRefuse, Handshake, OfferEnd, OfferStep, StepMessages
from .records import OpenClaim, OpenOffer, Place, Reports
from .settings import Settings
from .stats import Counters, KvxferStats
from .tables import GroupTokens

logger = logger_of("kvxfer")

#: Longest step that counts whole against `unclaimed_seconds`, in seconds.
STEP_SECONDS_MAX = 2.0
#: Longest name of an endpoint, in bytes.
NAME_BYTES_MAX = 64
#: Time that closing an endpoint may take, in seconds.
CLOSE_SECONDS = 2.0


class Worker:
    """One worker's half of the hand-over."""

    def __init__(self, settings: Settings, place: Place, role: str, engine_id: str):
        self.settings = settings
        self.place = place
        self.role = role
        self.name = endpoint_name(settings.name or engine_id, place.member)
        self.counters = Counters()
        self.endpoint: Any = None
        self.pool: Any = None
        self.cache: CacheLayout | None = None
        self._layer_numbers: dict[str, int] = {}
        self._offers: dict[str, OpenOffer] = {}
        self._claims: dict[str, OpenClaim] = {}
        self._numbers = itertools.count(1)
        # By the number that a handle's events carry; handles stay here until they have ended.
        self._handles: dict[int, tuple[str, OpenOffer | OpenClaim]] = {}
        self._reports = Reports()
        self._told: set[str] = set()
        self._mark: Callable[[], Any] | None = None
        # Computed, and waiting to be claimed.
        self._unclaimed: dict[str, OpenOffer] = {}
        # Seconds that this worker has been stepping, and when it last did.
        self._stepped, self._last_step = 0.0, time.monotonic()

    # ------------------------------------------------------------------------------------------ at the start

    def register(self, cache: CacheLayout, device: str | None = None, mark: Callable[[], Any] | None = None) -> None:
        """Opens the endpoint and registers the cache, which is on the host, or in memory of this kind of device.

        `mark` gives an event behind all that the device has been told to compute so far: what is released waits for it.

        Raises what kvxfer raises, with what to do: the server does not start.
        """
        place = self.place
        rank = kvxfer.Rank(
            tensor=(place.tensor_rank, place.tensor_size), pipeline=(place.pipeline_rank, place.pipeline_size)
        )
        options: dict[str, Any] = {"name": self.name, "rank": rank}
        listen = self.settings.listen_of(self.place.member)
        if listen is not None:
            options["listen"] = listen
        if self.settings.transports is not None:
            options["transports"] = self.settings.transports
        if self.settings.config is not None:
            options["config"] = self.settings.config
        self.endpoint = kvxfer.Endpoint(**options)
        self.cache = cache
        layout = cache.build(kvxfer)
        regions: list[Any] = cache.regions()
        if device is not None:
            regions = [kvxfer.MemoryRegion(address, length, owner, False, device) for address, length, owner in regions]
        self._mark = mark
        self.pool = self.endpoint.register(layout, regions, role=self.role)
        self._layer_numbers = {name.removesuffix(cache.tag): number for number, name in enumerate(layout.layers)}
        logger.info(
            "kvxfer %s: worker %d of %d, endpoint %s (%s), pool for %s: %s",
            kvxfer.__version__,
            self.place.member,
            self.place.members,
            self.endpoint.name,
            self.endpoint.address,
            {"serve": "prefill", "receive": "decode"}.get(self.role, "prefill and decode"),
            cache,
        )
        for line in self.endpoint.explain(self.endpoint.address).splitlines():
            if line.startswith(("transports here", "  not ")):
                logger.info("kvxfer: endpoint %s: %s", self.endpoint.name, line.strip())

    def handshake(self) -> Handshake | None:
        """What the scheduler needs of this worker."""
        if self.endpoint is None:
            return None
        return Handshake(str(self.endpoint.address), str(self.cache))

    # ------------------------------------------------------------------------------------- before the forward

    def take_back(self, request_ids: Sequence[str]) -> None:
        """Blocks of preempted requests are about to be overwritten: nothing read from them later counts."""
        waiting: list[tuple[str, OpenOffer]] = []
        for request_id in request_ids:
            offer = self._offers.get(request_id)
            if offer is None or offer.ended or not offer.blocks:
                continue
            self.counters.add("retracts")
            if self.settings.preemption == "retract":
                self._retract(request_id, offer)
                continue
            offer.blocks = []
            try:
                offer.handle.restart()
            except kvxfer.Error:
                continue  # It has ended: its event follows.
            waiting.append((request_id, offer))
        if waiting:
            self._await_voided(waiting)

    def _await_voided(self, waiting: list[tuple[str, OpenOffer]]) -> None:
        began = time.monotonic()
        limit = began + self.settings.preemption_wait_ms / 1e3
        looks = 0
        while waiting := [(name, offer) for name, offer in waiting if not offer.handle.voided()]:
            if time.monotonic() >= limit:
                for request_id, _ in waiting:
                    self.counters.add("retracts_late")
                    logger.warning(
                        "kvxfer: %s: a read of preempted blocks did not end within %d ms; what it read does not count",
                        request_id,
                        self.settings.preemption_wait_ms,
                    )
                break
            # A read is one call that does not sleep: yield first, then sleep.
            looks += 1
            time.sleep(0 if looks < 64 else 50e-6)
        self.counters.seconds("retract_seconds", time.monotonic() - began)

    def _retract(self, request_id: str, offer: OpenOffer) -> None:
        began = time.monotonic()
        blocks, offer.blocks = offer.blocks, []
        try:
            offer.handle.retract(blocks)
        except kvxfer.DeadlineExceeded as error:
            self.counters.add("retracts_late")
            logger.warning("kvxfer: %s: %s", request_id, error)
        except kvxfer.Error:
            pass  # It has ended: its event follows.
        self.counters.seconds("retract_seconds", time.monotonic() - began)

    def begin_step(self, step: StepMessages) -> None:
        """Does what the scheduler said, before the forward: bytes move while it runs."""
        for offer_step in step.offers:
            self._step_offer(offer_step)
        for end in step.offer_ends:
            self._end_offer(end)
        for claim in step.claims:
            self._open_claim(claim)
        for fill in step.fills:
            self._fill(fill)
        for request_id in step.declines:
            self._decline(request_id)
        for refuse in step.refusals:
            self._refuse(refuse)
        for request_id in step.claim_aborts:
            self._abort(request_id)

    # -------------------------------------------------------------------------------------------------- offers

    def _open_offer(self, request_id: str, key: str, readers: int) -> OpenOffer:
        offer = OpenOffer(key, next(self._numbers), time.monotonic())
        self._offers[request_id] = offer
        self.counters.add("offers_opened")
        try:
            offer.handle = self.endpoint.offer(
                key,
                self.pool,
                readers=readers,
                # kvxfer's own deadline for unmatched offers would count the time that prefill computes.
                deadline=float(self.settings.hold_seconds),
                checksum=self.settings.checksum,
                events=offer.number,
            )
        except kvxfer.Error as error:
            offer.ended = True
            self._fail_offer(request_id, error)
            return offer
        self._handles[offer.number] = (request_id, offer)
        return offer

    def _step_offer(self, step: OfferStep) -> None:
        offer = self._offers.get(step.request_id)
        if offer is None:
            offer = self._open_offer(step.request_id, step.key, step.readers)
        offer.layers_out = 0
        if offer.ended or step.append is None:
            return
        try:
            selection = self._selection(step.append)
            offer.handle.append(selection)
            offer.blocks.extend(block for _, _, blocks in selection for block in blocks)
        except kvxfer.Error as error:
            self._break_offer(step.request_id, offer, error)

    def layer_done(self, step: StepMessages, layer: str) -> None:
        """The forward is past this layer: its part of the step may go."""
        number = self._layer_numbers.get(layer)
        if number is None:
            return
        after = self._event(step)
        for offer_step in step.offers:
            offer = self._offers.get(offer_step.request_id)
            # In order and once: what does not fit goes when the step ends.
            if offer is None or offer.ended or offer_step.ready is None or offer.layers_out != number:
                continue
            if self._release(offer_step, offer, (number, number + 1), after):
                offer.layers_out = number + 1

    def end_step(self, step: StepMessages) -> None:
        """The forward is done, as far as this process is concerned: what it computed may go."""
        layers = len(self._layer_numbers)
        after = self._event(step)
        for offer_step in step.offers:
            offer = self._offers.get(offer_step.request_id)
            if offer is None or offer.ended or offer_step.ready is None:
                continue
            if offer_step.finish is not None:
                # Releases what has not been released.
                self.counters.add("parts_released")
                try:
                    offer.handle.finish(offer_step.finish, after=after)
                except kvxfer.Error as error:
                    self._break_offer(offer_step.request_id, offer, error)
            elif offer.layers_out < layers:
                self._release(offer_step, offer, (offer.layers_out, layers), after)

    def _event(self, step: StepMessages) -> Any:
        """An event behind what the device computes now, if there is a device and something waits for it."""
        return self._mark() if self._mark is not None and step.offers else None

    def _release(self, step: OfferStep, offer: OpenOffer, layers: tuple[int, int], after: Any) -> bool:
        assert step.ready is not None
        try:
            offer.handle.ready(*step.ready, layers, after=after)
        except kvxfer.Busy:
            return False  # At the limit of parts: the rest goes when it finishes.
        except kvxfer.Error as error:
            self._break_offer(step.request_id, offer, error)
            return False
        self.counters.add("parts_released")
        self.counters.add("parts_before_finish")
        if offer.matched:
            self.counters.add("parts_overlapped")
        return True

    def _break_offer(self, request_id: str, offer: OpenOffer, error: Exception) -> None:
        """A call was refused. If the offer has ended its event says why; else it cannot be completed, and ends here."""
        if offer.handle.done():
            return
        logger.error("kvxfer: %s: the hand-off is given up: %s", request_id, error)
        offer.handle.cancel()

    def _end_offer(self, end: OfferEnd) -> None:
        offer = self._offers.get(end.request_id)
        if offer is None:
            if end.report:
                self._reports.sent.add(end.request_id)
                return
            # Never begun. Claims that wait for it, or come, are to hear that it was cancelled.
            offer = self._open_offer(end.request_id, end.key, 1)
        offer.report = end.report
        offer.forgotten = not end.report
        if end.cancel and not offer.ended:
            self.counters.add("aborts")
            if offer.matched:
                self.counters.add("aborts_in_flight")
            offer.handle.cancel()
        elif not offer.ended:
            offer.unserved_at = self._stepped + self.settings.unserved_seconds
            self._await_claims(end.request_id, offer)
        self._settle_offer(end.request_id, offer)

    def _await_claims(self, request_id: str, offer: OpenOffer) -> None:
        # A claim without blocks holds ours, which its blocks may depend on: two small caches could wait for each other.
        offer.unclaimed_at = min(self._stepped + self.settings.unclaimed_seconds, offer.unserved_at)
        self._unclaimed.pop(request_id, None)
        self._unclaimed[request_id] = offer

    def _give_up_unclaimed(self) -> None:
        now = self._stepped
        for request_id, offer in list(self._unclaimed.items()):
            if offer.ended:
                del self._unclaimed[request_id]
            elif offer.unclaimed_at is not None and now >= offer.unclaimed_at:
                del self._unclaimed[request_id]
                waits = offer.handle.waiting_on()
                claimed = waits is None or waits[0] != "claim"
                if claimed and now < offer.unserved_at:
                    # Somebody is at it. Not all need have come: several readers, or several ranks of one.
                    self._await_claims(request_id, offer)
                    continue
                self.counters.add("offers_unclaimed")
                what, name = ("the end of its claim", "unserved") if claimed else ("a claim", "unclaimed")
                logger.warning(
                    "kvxfer: %s: its KV waited for %s for %d s (%s_seconds) after it was computed: its blocks are "
                    "freed; check that decode has free blocks, its transfer_id and this server's addresses",
                    request_id,
                    what,
                    getattr(self.settings, f"{name}_seconds"),
                    name,
                )
                offer.handle.cancel()

    def _offer_ended(self, request_id: str, offer: OpenOffer) -> None:
        offer.ended = True
        offer.blocks = []
        handle, offer.handle = offer.handle, None
        try:
            handle.poll()
        except kvxfer.Error as error:
            if error.kind == "Declined":
                self.counters.add("offers_declined")
            else:
                self._fail_offer(request_id, error)
        else:
            self.counters.add("offers_released")
            self.counters.seconds("offer_seconds", time.monotonic() - offer.began)
        self._settle_offer(request_id, offer)

    def _fail_offer(self, request_id: str, error: Any) -> None:
        self.counters.add("offers_failed")
        level = logger.debug if error.kind == "Cancelled" else logger.warning
        level("kvxfer: %s: its KV is not handed over: %s", request_id, _reason(error))

    def _settle_offer(self, request_id: str, offer: OpenOffer) -> None:
        """Reports, or forgets, an offer that has ended."""
        if not offer.ended or self._offers.get(request_id) is not offer:
            return
        if offer.report:
            self._reports.sent.add(request_id)
        if offer.report or offer.forgotten:
            del self._offers[request_id]

    # -------------------------------------------------------------------------------------------------- claims

    def _open_claim(self, open_: ClaimOpen) -> None:
        claim = OpenClaim(next(self._numbers), open_.addresses)
        self._claims[open_.request_id] = claim
        self.counters.add("claims_opened")
        try:
            addresses = [kvxfer.EndpointAddress(address) for address in open_.addresses]
            claim.handle = self.endpoint.claim(
                open_.key,
                self.pool,
                addresses,
                set=open_.set,
                member=self.place.member,
                members=self.place.members,
                events=claim.number,
            )
        except (kvxfer.Error, ValueError) as error:
            claim.failure = _reason(error)
            return
        self._handles[claim.number] = (open_.request_id, claim)

    def _fill(self, fill: ClaimFill) -> None:
        claim = self._claims.get(fill.request_id)
        if claim is None:
            self._report_failed(fill.request_id, "its claim is not known")
            return
        claim.filled = True
        claim.filled_at = time.monotonic()
        if claim.failure is None:
            try:
                claim.handle.fill(self._selection(fill.groups))
                return
            except kvxfer.Error as error:
                if claim.handle.done():
                    return  # Its event says why, and is reported then.
                claim.failure = _reason(error)
                claim.handle.cancel()
                return  # Nothing was written; the end is reported when it comes.
        del self._claims[fill.request_id]
        self._fail_claim(fill.request_id, claim.failure)

    def _decline(self, request_id: str) -> None:
        claim = self._claims.pop(request_id, None)
        if claim is None:
            return
        self.counters.add("claims_declined")
        claim.declined = True
        if claim.handle is not None:
            claim.handle.decline()

    def _refuse(self, refuse: ClaimRefuse) -> None:
        self._report_failed(refuse.request_id, refuse.why)

    def _abort(self, request_id: str) -> None:
        claim = self._claims.get(request_id)
        if claim is None or claim.aborted or claim.handle is None:
            return
        claim.aborted = True
        self.counters.add("aborts")
        if claim.filled:
            self.counters.add("aborts_in_flight")
        claim.handle.cancel()

    def _claim_ended(self, request_id: str, claim: OpenClaim) -> None:
        handle, claim.handle = claim.handle, None
        if claim.declined:
            return
        try:
            arrival = handle.poll()
        except kvxfer.Error as error:
            self._claim_failed(request_id, claim, error)
            return
        del self._claims[request_id]
        self.counters.add("claims_arrived")
        self.counters.add("bytes_received", arrival.bytes)
        self.counters.seconds("claim_seconds", time.monotonic() - claim.filled_at)
        self._reports.received.add(request_id)
        self._tell_of_peers(claim.addresses)

    def _tell_of_peers(self, addresses: tuple[str, ...]) -> None:
        """Names the path taken, once for each peer."""
        if self._told.issuperset(addresses):
            return
        self._told.update(addresses)
        for peer in self.endpoint.peers():
            if str(peer.address) in addresses:
                logger.info(
                    "kvxfer: endpoint %s receives from %s (%s) over %s",
                    self.name,
                    peer.name,
                    peer.address,
                    peer.transport,
                )

    def _claim_failed(self, request_id: str, claim: OpenClaim, error: Any) -> None:
        if not claim.filled:
            # vLLM has no use for it before the request has blocks.
            claim.failure = _reason(error)
            return
        if error.destination == "quarantined":
            # Something may still write into the blocks: they are not given back, and the request stays as it is.
            self.counters.add("claims_quarantined")
            logger.error("kvxfer: %s: its blocks are kept: %s", request_id, _reason(error))
            return
        del self._claims[request_id]
        if claim.aborted:
            self.counters.add("claims_aborted")
            self._reports.received.add(request_id)
        else:
            self._fail_claim(request_id, claim.failure or _reason(error))

    def _fail_claim(self, request_id: str, why: str) -> None:
        self.counters.add("claims_failed")
        self._report_failed(request_id, why)

    def _report_failed(self, request_id: str, why: str) -> None:
        logger.warning("kvxfer: %s: its KV was not received: %s", request_id, why)
        self._reports.received.add(request_id)
        self._reports.failed.add(request_id)

    # ----------------------------------------------------------------------------------------- after the forward

    def results(self) -> Reports:
        """What has ended since the last call."""
        now = time.monotonic()
        # Time in which this process, or the whole machine, stood still is not time in which a claim could have come.
        self._stepped += min(now - self._last_step, STEP_SECONDS_MAX)
        self._last_step = now
        if self.endpoint is not None:
            while events := self.endpoint.events.drain(1024):
                for event in events:
                    self._on_event(event)
            if self._unclaimed:
                self._give_up_unclaimed()
        reports, self._reports = self._reports, Reports()
        return reports

    def _on_event(self, event: Any) -> None:
        request_id, owner = self._handles.get(event.data, ("", None))
        if owner is None:
            return
        if event.kind == "matched":
            if isinstance(owner, OpenOffer):
                owner.matched = True
        elif event.kind == "restarted":
            if isinstance(owner, OpenClaim):
                self.counters.add("claims_restarted")
        elif event.kind == "ended":
            del self._handles[event.data]
            if isinstance(owner, OpenOffer):
                self._offer_ended(request_id, owner)
            else:
                self._claim_ended(request_id, owner)

    def take_stats(self) -> KvxferStats | None:
        """What was counted since the last call."""
        return self.counters.take()

    def close(self) -> None:
        """Ends the endpoint, in bounded time. What is open is cancelled."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is None:
            return
        try:
            endpoint.close(timeout=CLOSE_SECONDS)
        except kvxfer.Error as error:
            logger.warning("kvxfer: closing endpoint %s: %s", self.name, error)
        self._handles.clear()
        self._offers.clear()
        self._unclaimed.clear()
        self._claims.clear()

    def _selection(self, groups: Sequence[GroupTokens]) -> list[tuple[int, int, list[int]]]:
        assert self.cache is not None
        return self.cache.selection(groups)


def endpoint_name(label: str, member: int) -> str:
    """The label and the worker's number, in as many bytes as a name may have."""
    number = f"-{member}"
    kept = label.encode("utf-8", "replace")[: NAME_BYTES_MAX - len(number)]
    return kept.decode("utf-8", "ignore") + number


def _reason(error: Exception) -> str:
    """The kind of the error, and what it says."""
    return f"{getattr(error, 'kind', type(error).__name__)}: {error}"
