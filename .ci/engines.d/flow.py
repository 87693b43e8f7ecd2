"""Scenarios in which nothing goes wrong: every way a request's KV cache takes from prefill to decode."""
import concurrent.futures
import time

import metrics
from client import Refused, complete
from pairs import BLOCK
from trial import require

SIZES = [40, 64, 129, 500, 1000, 2000, 3000]
OVERLAP_SIZES = [3000, 1500, 700, 2600]
TOKENS = 32


def all_at_once(work, items, most=16):
    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        return list(pool.map(work, items))


def basic(trial):
    """Requests of many sizes, then 12 at once; another prompt's KV must show; what was handed over once is not there twice."""
    prompts = [trial.prompt(size) for size in SIZES]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    for prompt in prompts:
        trial.same(trial.handed_over(prompt, TOKENS), prompt, TOKENS, "a hand-over")
    began = time.monotonic()
    crowd = [prompts[number % len(prompts)] for number in range(12)]
    for prompt, answer in zip(crowd, all_at_once(lambda prompt: trial.handed_over(prompt, TOKENS), crowd)):
        trial.same(answer, prompt, TOKENS, "one of 12 hand-overs at once")
    crowd_s = time.monotonic() - began
    total = sum(map(len, prompts + crowd))
    carried = carries(trial, len(prompts) + len(crowd), total)
    control(trial)
    again(trial)
    return f"{trial.compared_text()}; {carried}; 12 at once in {crowd_s:.1f} s; another prompt's KV shows; a second use is refused"


def carries(trial, requests, tokens):
    """Demands that decode had its tokens from prefill, in vLLM's own count and in kvxfer's."""
    external = trial.since_decode(metrics.BY_SOURCE, source="external_kv_transfer")
    loaded = trial.since_decode(metrics.TOKENS_LOADED)
    require(external >= tokens - requests, f"decode had {external} tokens from prefill, of {tokens} in {requests} requests (vLLM's count)")
    require(loaded == tokens, f"decode asked for {loaded} tokens, of {tokens} (kvxfer's count)")
    arrived = trial.since_decode.wait(metrics.CLAIMS_ARRIVED, requests, 5)
    require(arrived >= requests, f"{arrived} claims arrived, of {requests}")
    released = trial.since_prefill.wait(metrics.OFFERS_RELEASED, requests, 5)
    require(released >= requests, f"{released} offers were released, of {requests}")
    return f"{loaded} tokens in {requests} hand-overs, {trial.since_decode(metrics.BYTES_RECEIVED) >> 20} MiB"


def control(trial):
    """That the comparison can fail at all: with another prompt's KV, the answer must be another."""
    mine, donor = trial.prompt(500), trial.prompt(500)
    expected = trial.reference(mine, TOKENS)
    answer = trial.handed_over(mine, TOKENS, donor=donor)
    require(answer.tokens != expected.tokens, "decode was given another prompt's KV cache and answered as if it had its own: it does not use what it is given")


def again(trial):
    """A request that uses what has been handed over already is an error and not an answer from somebody else's blocks."""
    prompt = trial.prompt(300)
    transfer = trial.prefilled(prompt)
    trial.same(complete(trial.decode, prompt, TOKENS, dict(transfer)), prompt, TOKENS, "the first use")
    try:
        second = complete(trial.decode, prompt, TOKENS, dict(transfer))
    except Refused:
        return
    require(second.finish == "error" or not second.tokens, "what was handed over already was accepted a second time, with kv_load_failure_policy=fail")


def prefix(trial):
    """Prompts that share 1,024 tokens, which decode holds after the first: only the rest is handed over."""
    shared = trial.prompt(1024)
    prompts = [trial.prompt(1024 + rest, after=shared) for rest in (200, 37, 64, 500, 1000)]
    crowd = [trial.prompt(1024 + 100 + 31 * number, after=shared) for number in range(8)]
    for prompt in prompts + crowd:
        trial.reference(prompt, TOKENS)
    trial.same(trial.handed_over(prompts[0], TOKENS), prompts[0], TOKENS, "the first prompt")
    first = trial.since_decode(metrics.TOKENS_SKIPPED)
    require(first == 0, f"{first} tokens of the first prompt were skipped, which decode cannot have held")
    for prompt in prompts[1:]:
        trial.same(trial.handed_over(prompt, TOKENS), prompt, TOKENS, "a prompt with the shared prefix")
    for prompt, answer in zip(crowd, all_at_once(lambda prompt: trial.handed_over(prompt, TOKENS), crowd)):
        trial.same(answer, prompt, TOKENS, "one of 8 prompts at once with the shared prefix")
    followers = prompts[1:] + crowd
    skipped, received = trial.since_decode(metrics.TOKENS_SKIPPED), trial.since_decode(metrics.TOKENS_LOADED)
    require(skipped >= 1024 * len(followers), f"{skipped} tokens skipped; {len(followers)} prompts shared 1,024")
    most = sum(map(len, prompts + crowd)) - skipped
    require(received <= most, f"{received} tokens were asked for, although only {most} were not held")
    hits = trial.since_decode(metrics.PREFIX_HITS)
    require(hits >= 1024 * len(followers), f"vLLM counts {hits} tokens found in decode's prefix cache")
    # The whole prompt again: all of it, or all but the last block, is there.
    for prompt in (prompts[0], shared + trial.prompt(0), prompts[2]):
        before = trial.since_decode(metrics.TOKENS_SKIPPED)
        trial.same(trial.handed_over(prompt, TOKENS), prompt, TOKENS, "a prompt that decode holds whole")
        held = trial.since_decode(metrics.TOKENS_SKIPPED) - before
        require(held >= len(prompt) - 2 * BLOCK, f"decode held a prompt of {len(prompt)} tokens, and {held} were skipped")
    return f"{trial.compared_text()}; {skipped} tokens skipped and {received} loaded in {len(followers) + 1} hand-overs, whole prompts repeated"


def overlap(trial):
    """Both requests at once with one transfer_id, in either order: parts are handed over while prefill goes on."""
    sizes = OVERLAP_SIZES
    prompts = [trial.prompt(size) for size in sizes]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    trial.for_decode("")   # learns the addresses before anything is counted
    before, before_overlapped = trial.since_prefill(metrics.EARLY_PARTS), trial.since_prefill(metrics.OVERLAPPED_PARTS)
    for prompt, ahead in zip(prompts, (0, 0.1, -0.3, -0.05)):
        prefill, decode = trial.together(prompt, TOKENS, ahead)
        prefill.result()
        trial.same(decode.result(), prompt, TOKENS, "a hand-over with both requests at once")
    early = trial.since_prefill(metrics.EARLY_PARTS) - before
    least = sum(size // 256 for size in sizes) - len(sizes)
    require(early >= least, f"{early} parts were handed over before their request was finished; with chunks of 256 tokens, {least} can be")
    overlapped = trial.since_prefill(metrics.OVERLAPPED_PARTS) - before_overlapped
    require(overlapped >= least // 2, f"{overlapped} of {early} parts were released while a claim had met the offer")

    def one(prompt):
        prefill, decode = trial.together(prompt, TOKENS)
        prefill.result()
        return decode.result()

    for prompt, answer in zip(prompts * 2, all_at_once(one, prompts * 2)):
        trial.same(answer, prompt, TOKENS, "one of 8 at once, each with both requests at once")
    return f"{trial.compared_text()}; {early} parts before finish, {overlapped} with their reader there, in {len(sizes)} requests one by one, then 8 at once"


def layers(trial):
    """Both requests at once, with `layerwise`: each layer of a chunk is handed over when the forward is past it."""
    figures = overlap(trial)
    early = trial.since_prefill(metrics.EARLY_PARTS)
    chunks = 2 * sum(size // 256 for size in OVERLAP_SIZES)
    require(early >= 3 * chunks, f"{early} parts before finish for {chunks} chunks or so, of a model with 4 layers")
    return figures


def chunked(trial):
    """Prefill in chunks of 256 tokens (--max-num-batched-tokens), alone and with chunks of several requests in a step."""
    prompts = [trial.prompt(size) for size in (256, 257, 300, 1000, 2500)]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    for prompt in prompts:
        trial.same(trial.handed_over(prompt, TOKENS), prompt, TOKENS, "a hand-over")
    parts = trial.since_prefill(metrics.PARTS)
    least = sum(-(-len(prompt) // 256) for prompt in prompts)
    require(parts >= least, f"{parts} parts for prompts of {least} chunks")
    crowd = prompts + prompts[:1] + prompts[3:]
    for prompt, answer in zip(crowd, all_at_once(lambda prompt: trial.handed_over(prompt, TOKENS), crowd)):
        trial.same(answer, prompt, TOKENS, "one of 8 hand-overs at once")
    carried = carries(trial, len(prompts) + len(crowd), sum(map(len, prompts + crowd)))
    return f"{trial.compared_text()}; {parts} parts for {len(prompts)} requests, {carried}"


def preemption(trial):
    """A cache so small that prefill preempts requests whose parts are being handed over: they are retracted, and come out right."""
    prompts = [trial.prompt(size) for size in (600, 800, 500, 900, 700, 650)]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    preempted, retracts = trial.since_prefill(metrics.PREEMPTIONS), trial.since_prefill(metrics.RETRACTS)
    rounds = 0
    limit = time.monotonic() + 120

    def one(job):
        number, prompt = job
        if number % 3 == 2:
            return trial.handed_over(prompt, TOKENS)
        prefill, decode = trial.together(prompt, TOKENS)
        prefill.result()
        return decode.result()

    trial.for_decode("")
    while rounds < 3 or trial.since_prefill(metrics.RETRACTS) == retracts:
        require(time.monotonic() < limit, f"{rounds} rounds preempted {trial.since_prefill(metrics.PREEMPTIONS) - preempted} requests on prefill, and retracted none")
        for prompt, answer in zip(prompts, all_at_once(one, enumerate(prompts))):
            trial.same(answer, prompt, TOKENS, "a request in a cache that is too small")
        rounds += 1
    preempted = trial.since_prefill(metrics.PREEMPTIONS) - preempted
    retracts = trial.since_prefill(metrics.RETRACTS) - retracts
    require(preempted > 0, "vLLM counts no preemption on prefill")
    on_decode = trial.since_decode(metrics.PREEMPTIONS)
    return f"{trial.compared_text()}; prefill preempted {preempted} requests, {retracts} retracts; decode preempted {on_decode}; {rounds * len(prompts)} requests"


def tensor_parallel(trial):
    """Different tensor-parallel sizes on the two sides: each rank hands over, or takes, its heads."""
    prompts = [trial.prompt(size) for size in (40, 129, 500, 1000, 2000)]
    for prompt in prompts:
        trial.reference(prompt, TOKENS)
    for prompt in prompts:
        trial.same(trial.handed_over(prompt, TOKENS), prompt, TOKENS, "a hand-over")
    crowd = [prompts[number % len(prompts)] for number in range(12)]
    for prompt, answer in zip(crowd, all_at_once(lambda prompt: trial.handed_over(prompt, TOKENS), crowd)):
        trial.same(answer, prompt, TOKENS, "one of 12 hand-overs at once")
    external = trial.since_decode(metrics.BY_SOURCE, source="external_kv_transfer")
    total = sum(map(len, prompts + crowd))
    require(external >= total - BLOCK * (len(prompts) + len(crowd)), f"decode had {external} tokens from prefill, of {total}")
    control(trial)
    return f"{trial.compared_text()}; {external} of {total} tokens handed over; another prompt's KV shows"
