"""What every scenario uses: a router for the pair, the reference without disaggregation, and the checks that follow."""
import random
import threading
import time
import uuid

import client
import metrics
from client import Completion, complete

# Log-probabilities of the same request differ in the last digits with what else was in its batch.
TOLERANCE = 1e-3
IDS = range(300, 2000)
SETTLE_LIMIT_S = 90
ATTEMPTS = 5


class Failed(Exception):
    """A scenario's demand that did not hold."""


def require(holds, text):
    if not holds:
        raise Failed(text)


class Trial:
    def __init__(self, pair, name):
        self.pair, self.name = pair, name
        self.prefill, self.decode = pair
        self.random = random.Random(name)
        self.references, self.lock = {}, threading.Lock()
        self.worst = 0.0
        self.compared = 0
        self.since_prefill, self.since_decode = metrics.Since(self.prefill), metrics.Since(self.decode)

    # Prompts and their reference.

    def prompt(self, length, after=()):
        """A new prompt of this many tokens, the first of them given."""
        return list(after) + [self.random.choice(IDS) for _ in range(length - len(after))]

    def reference(self, prompt, tokens):
        """What prefill answers by itself, as one instance that does not disaggregate."""
        key = (tuple(prompt), tokens)
        with self.lock:
            known = self.references.get(key)
        if known is None:
            known = complete(self.prefill, prompt, tokens)
            with self.lock:
                self.references[key] = known
        return known

    def same(self, answer, prompt, tokens, what):
        """Demands the reference's tokens and log-probabilities."""
        self.equal(answer, self.reference(prompt, tokens), prompt, what)

    def equal(self, answer, expected, prompt, what):
        if answer.tokens != expected.tokens:
            raise Failed(f"{what} ({len(prompt)} tokens): {differing(answer.tokens, expected.tokens)}")
        apart = max(abs(one - other) for one, other in zip(answer.logprobs, expected.logprobs))
        require(apart <= TOLERANCE, f"{what} ({len(prompt)} tokens): the same tokens, log-probabilities {apart:.2e} apart")
        with self.lock:
            self.worst, self.compared = max(self.worst, apart), self.compared + 1

    # The router.

    def prefilled(self, prompt, transfer_id=None):
        """Has prefill make the prompt's KV cache. Returns what its answer says for decode."""
        answer = complete(self.prefill, prompt, 1, for_prefill(transfer_id))
        require(answer.transfer, "prefill answered without kv_transfer_params")
        return answer.transfer

    def handed_over(self, prompt, tokens, donor=None):
        """One request, prefill first and decode when it has answered."""
        return complete(self.decode, prompt, tokens, self.prefilled(donor or prompt))

    def together(self, prompt, tokens, ahead=0.0):
        """Both requests at once, under one transfer_id. With `ahead` seconds between them: prefill's first, or decode's if negative."""
        key = uuid.uuid4().hex
        starts = [lambda: Completion(self.prefill, prompt, 1, for_prefill(key)), lambda: Completion(self.decode, prompt, tokens, self.for_decode(key))]
        order = (1, 0) if ahead < 0 else (0, 1)
        begun = {}
        for position in order:
            begun[position] = starts[position]()
            if position == order[0] and ahead:
                time.sleep(abs(ahead))
        return begun[0], begun[1]

    def alone(self, prompt, tokens):
        """Decode's request only, and the transfer_id under which prefill's might follow."""
        key = uuid.uuid4().hex
        return Completion(self.decode, prompt, tokens, self.for_decode(key)), key

    def under_way(self, prompt, tokens):
        """Both requests at once, at a moment when some parts have been released and prefill has not finished."""
        for _ in range(ATTEMPTS):
            before = metrics.Since(self.prefill)
            prefill, decode = self.together(prompt, tokens)
            released = before.wait(metrics.EARLY_PARTS, 1, limit_s=30)
            if released and not prefill.done():
                return prefill, decode
            prefill.join(60)
            decode.join(60)
        raise Failed(f"{ATTEMPTS} requests of {len(prompt)} tokens were finished before they could be disturbed")

    def for_decode(self, key):
        """A router that starts both at once knows prefill's addresses beforehand: it asks each life of a server once."""
        with self.lock:
            known = getattr(self.prefill, "addresses", None)
            if known is None or known[0] != self.prefill.starts:
                described = complete(self.prefill, [IDS[0]], 1, dict(describe=True)).transfer
                require(described and described.get("remote_addresses"), "prefill does not say its addresses when it is asked to describe itself")
                known = self.prefill.addresses = (self.prefill.starts, described)
        return dict(known[1], do_remote_prefill=True, do_remote_decode=False, transfer_id=key)

    # Afterwards.

    def settled(self, servers=None):
        """Demands that nothing is left over: no request, no KV block in use, no handle open. Returns how long that took."""
        began = time.monotonic()
        for server in servers or self.pair:
            while True:
                left = leftovers(server)
                if not left:
                    break
                require(time.monotonic() - began < SETTLE_LIMIT_S, f"{server.name} still has, {SETTLE_LIMIT_S} s later: {left}")
                time.sleep(0.2)
        return time.monotonic() - began

    def answers(self, servers=None):
        """Demands that each server still answers correctly, and that a hand-over still works."""
        plain = self.prompt(150)
        for server in servers or self.pair:
            self.same(complete(server, plain, 16), plain, 16, f"a plain request to {server.name}")
        prompt = self.prompt(400)
        self.same(self.handed_over(prompt, 16), prompt, 16, "a hand-over afterwards")

    def compared_text(self):
        return f"{self.compared} answers equal, log-probabilities within {self.worst:.0e}"


def for_prefill(transfer_id=None):
    transfer = dict(do_remote_decode=True, do_remote_prefill=False)
    if transfer_id:
        transfer["transfer_id"] = transfer_id
    return transfer


def differing(tokens, expected):
    if len(tokens) != len(expected):
        return f"{len(tokens)} tokens for {len(expected)}"
    at = next(index for index, (one, other) in enumerate(zip(tokens, expected)) if one != other)
    return f"tokens differ from number {at}: {tokens[at:at + 4]} for {expected[at:at + 4]}"


def leftovers(server):
    """What a server has not given back yet, as text. It learns of some of it, and counts it, only when it takes a step: so it gets a request."""
    complete(server, [IDS[1], IDS[2], IDS[3]], 1, timeout=30)
    now = metrics.read(server)
    left = {name: now.sum(name) for name in (metrics.USAGE, metrics.RUNNING, metrics.WAITING)}
    left["offers open"] = now.sum(metrics.OFFERS_OPENED) - sum(map(now.sum, metrics.OFFERS_ENDED))
    left["claims open"] = now.sum(metrics.CLAIMS_OPENED) - sum(map(now.sum, metrics.CLAIMS_ENDED))
    return ", ".join(f"{name} {value:g}" for name, value in left.items() if value)
