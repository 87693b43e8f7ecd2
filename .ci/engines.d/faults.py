"""Scenarios in which something goes wrong, and nobody else may notice."""
import concurrent.futures
import random
import time

import metrics
from client import Completion, Refused, complete
from flow import TOKENS
from server import Stopped
from trial import for_prefill, require

# Many chunks: long enough under way to be disturbed.
LONG = 7000
# A lost peer is reported after 10 s of silence here; vLLM then computes the prompt itself, on a machine that may be slow.
LOSS_LIMIT_S = 45


def aborts(trial):
    """Clients that disconnect before, during and after the hand-over."""
    trial.for_decode("")
    before = abort_before(trial)
    during = abort_during(trial)
    after = abort_after(trial)
    return f"{before}; {during}; {after}"


def abort_before(trial):
    """While decode waits for an offer that has not been made; and while prefill has not begun, or nobody has come to its offer."""
    count = 0
    for _ in range(3):
        prompt = trial.prompt(800)
        decode, key = trial.alone(prompt, 64)
        time.sleep(0.5)
        require(decode.give_up(), "decode answered although nothing was offered")
        # Prefill's request comes too late, and is an ordinary request.
        complete(trial.prefill, prompt, 1, for_prefill(key))
        count += 1
    for _ in range(3):
        offered = trial.prefilled(trial.prompt(500))   # nobody comes for it
        require(offered, "nothing was offered")
        count += 1
    for pause in (0.0, 0.02, 0.1):
        prefill = Completion(trial.prefill, trial.prompt(2000), 1, for_prefill())
        time.sleep(pause)
        count += prefill.give_up()
    trial.settled()
    return f"before: {count} aborted"


def abort_during(trial):
    """After prefill has released parts, and before it has finished. Then with decode or prefill standing still at that moment."""
    aborted = trial.since_decode(metrics.ABORTS_IN_FLIGHT), trial.since_prefill(metrics.ABORTS_IN_FLIGHT)

    # Decode's client goes: prefill's request goes on as if nothing were.
    for _ in range(3):
        prompt = trial.prompt(LONG)
        prefill, decode = trial.under_way(prompt, 64)
        require(decode.give_up(), "decode had answered before it could be aborted: nothing was in flight")
        prefill.result()
    on_decode = trial.since_decode.wait(metrics.ABORTS_IN_FLIGHT, aborted[0] + 1, 10) - aborted[0]
    require(on_decode >= 1, "decode counts no abort in flight")

    # Prefill's client goes: decode's request is computed there and answered.
    for _ in range(2):
        prompt = trial.prompt(LONG)
        trial.reference(prompt, TOKENS)
        prefill, decode = trial.under_way(prompt, TOKENS)
        require(prefill.give_up(), "prefill had answered before it could be aborted: nothing was in flight")
        trial.same(decode.result(), prompt, TOKENS, "a request whose prefill was aborted")
    on_prefill = trial.since_prefill.wait(metrics.ABORTS_IN_FLIGHT, aborted[1] + 1, 10) - aborted[1]
    require(on_prefill >= 1, "prefill counts no abort in flight")

    # Prefill's workers stand still while bytes are under way: decode must get its blocks back without them.
    prompt = trial.prompt(LONG)
    prefill, decode = trial.under_way(prompt, 64)
    with Stopped(trial.prefill.workers()):
        require(decode.give_up(), "decode had answered before it could be aborted: nothing was in flight")
        waited = trial.settled([trial.decode])
    prefill.join(60)
    # And decode's: nobody is there to take the bytes, nor to say that it will not.
    prompt = trial.prompt(LONG)
    prefill, decode = trial.under_way(prompt, 64)
    with Stopped(trial.decode.workers()):
        require(decode.give_up(), "decode had answered before it could be aborted: nothing was in flight")
        prefill.join(60)
        time.sleep(0.5)
    trial.settled()
    return f"during: {on_decode} in flight on decode, {on_prefill} on prefill, blocks back {waited:.1f} s after an abort with prefill stopped"


def abort_after(trial):
    """While decode generates."""
    count = 0
    for _ in range(3):
        prompt = trial.prompt(700)
        begun = trial.since_decode(metrics.CLAIMS_ARRIVED)
        decode = Completion(trial.decode, prompt, 3000, trial.prefilled(prompt))
        require(trial.since_decode.wait(metrics.CLAIMS_ARRIVED, begun + 1, 30) > begun, "no hand-over within 30 s")
        require(decode.give_up(), "decode had answered before it could be aborted")
        count += 1
    trial.settled()
    return f"after: {count} aborted"


def restarts(trial):
    """Prefill is killed while decode waits for it, and comes back; then decode is, in the middle of a hand-over."""
    prefill, decode = trial.pair
    # Decode waits for parts that never come.
    prompt = trial.prompt(LONG)
    expected = trial.reference(prompt, TOKENS)
    stale = trial.prefilled(trial.prompt(200))
    old = trial.prompt(200)
    expected_old = trial.reference(old, TOKENS)
    asked, waiting = trial.under_way(prompt, TOKENS)
    require(not waiting.done(), "decode had answered before prefill could be killed")
    began = time.monotonic()
    prefill.kill()
    answer = waiting.result()
    alone_s = time.monotonic() - began
    trial.equal(answer, expected, prompt, "a request whose prefill was killed")
    require(alone_s < LOSS_LIMIT_S, f"decode answered {alone_s:.1f} s after prefill was killed")
    asked.join(30)
    trial.settled([decode])
    plain = trial.prompt(120)
    lonely = complete(decode, plain, TOKENS)
    prefill.start()
    prefill.wait_ready()
    trial.same(lonely, plain, TOKENS, "a plain request to decode while prefill was away")
    # What the one before it had promised is gone: decode must not take the new one's blocks for it.
    trial.equal(complete(decode, old, TOKENS, stale), expected_old, old, "a request that came with the addresses of prefill's last life")
    trial.answers()
    failed = trial.since_decode(metrics.CLAIMS_FAILED)
    require(failed >= 2, f"{failed} failed loads were counted, of 2")

    # Prefill is left with an offer whose reader is gone.
    prompt = trial.prompt(LONG)
    asked, waiting = trial.under_way(prompt, TOKENS)
    began = time.monotonic()
    decode.kill()
    asked.result()
    trial.settled([prefill])
    freed_s = time.monotonic() - began
    require(freed_s < LOSS_LIMIT_S, f"prefill had its blocks back {freed_s:.1f} s after decode was killed")
    waiting.join(30)
    require(waiting.error is not None, "a request to a server that was killed has an answer")
    decode.start()
    decode.wait_ready()
    trial.answers()
    return f"{trial.compared_text()}; decode answered {alone_s:.1f} s after prefill's death, prefill had its blocks back {freed_s:.1f} s after decode's; {failed} loads failed and were computed by decode"


ENDS = dict(arrived=metrics.CLAIMS_ARRIVED, failed=metrics.CLAIMS_FAILED, declined=metrics.CLAIMS_DECLINED, aborted=metrics.CLAIMS_ABORTED)


def storm(trial):
    """200 requests, 16 at a time, a quarter of them aborted at some moment of their life; half with both requests at once."""
    source = random.Random("storm")
    prompts = [trial.prompt(size) for size in (40, 64, 129, 200, 256, 300, 450, 500, 640, 800, 1000, 1500)]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    trial.for_decode("")
    jobs = [(source.choice(prompts), number % 4 == 3, source.random() < 0.5, source.random(), source.random()) for number in range(200)]

    def one(job):
        prompt, aborted, both, moment, which = job
        if both:
            prefill, decode = trial.together(prompt, TOKENS, ahead=0.05 * (which - 0.5))
        else:
            if aborted and which < 0.3:
                prefill = Completion(trial.prefill, prompt, 1, for_prefill())
                time.sleep(moment)
                return "aborted" if prefill.give_up() else "too late"
            prefill = None
            decode = Completion(trial.decode, prompt, TOKENS, trial.prefilled(prompt))
        if aborted:
            time.sleep(1.5 * moment ** 2)   # more of them early, while the hand-over is under way
            pending = [decode.give_up()]
            if prefill and which < 0.5:
                pending.append(prefill.give_up())
            elif prefill:
                prefill.result()
            return "aborted" if any(pending) else "too late"
        if prefill:
            prefill.result()
        trial.same(decode.result(), prompt, TOKENS, "a request in the storm")
        return "answered"

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        ends = list(pool.map(one, jobs))
    seconds = time.monotonic() - began
    counted = {end: ends.count(end) for end in ("answered", "aborted", "too late")}
    require(counted["answered"] == 150, f"{counted}: 150 were to be answered")
    require(counted["aborted"] >= 25, f"{counted}: most aborts came after the answer, so this was no storm")
    settle_s = trial.settled()
    flight = trial.since_decode(metrics.ABORTS_IN_FLIGHT) + trial.since_prefill(metrics.ABORTS_IN_FLIGHT)
    require(flight >= 3, f"{flight} aborts were in flight")
    claims = ", ".join(f"{trial.since_decode(name)} {word}" for word, name in ENDS.items())
    return f"{trial.compared_text()}; {counted['aborted']} aborted ({counted['too late']} too late), {flight} of them in flight, {seconds:.0f} s; claims: {claims}; all given back in {settle_s:.1f} s"
