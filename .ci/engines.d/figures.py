"""What a hand-over adds to a request: decode with transfer minus decode without, paired.

Each sample is one new prompt of 63 blocks and a token. Prefill makes its KV cache, which is not timed. Then decode gets
  1. the request with the transfer: it takes the KV cache from prefill, and computes one token;
  2. the same request without: its prefix cache holds the same 63 blocks now, and it computes the same one token;
  3. that once more.
What 1 takes longer than 2 is the hand-over, as the client sees it. What 3 takes longer than 2 is the measurement's own error.
Only samples count in which vLLM says that the tokens came from where they had to, and the answers are equal; the others are failures.
"""
import json
import statistics
import time

import metrics
import pairs
import runner
import server
import setup
from client import Refused, complete
from home import LOGS, Problem
from trial import TOLERANCE, Trial

TOKENS = 63 * pairs.BLOCK + 1
WARM_UP = 3
REQUEST_LIMIT_S = 60
TOTAL_LIMIT_S = 900


class Useless(Exception):
    """A sample in which the tokens did not come from where they should have."""


def measure(samples, connectors):
    results = []
    with runner.ending_well():
        try:
            setup.ready()
            for name in connectors:
                results.append(one(name, samples))
        except Problem as problem:
            print(f"engines: {problem}")
            return 1
    table(results)
    print(json.dumps(results))
    return 0 if all(result["samples"] >= min(samples, 30) for result in results if result["connector"] == "kvxfer") else 1


def one(name, samples):
    logs = LOGS / f"{time.strftime('%m%d-%H%M%S')}-figures-{name}"
    logs.mkdir(parents=True)
    connector = server.kvxfer("fail") if name == "kvxfer" else server.nixl()
    flags = ["--block-size", pairs.BLOCK, "--max-model-len", 4096, "--enable-prefix-caching"]
    added, error, with_transfer, plain, failures = [], [], [], [], []
    with runner.alone():
        pair = pairs.pair(logs, connector, flags)
        try:
            pair.start()
            trial = Trial(pair, f"figures of {name}")
            limit = time.monotonic() + TOTAL_LIMIT_S
            attempts = 0
            while len(added) < samples and time.monotonic() < limit and attempts < WARM_UP + 2 * samples:
                attempts += 1
                try:
                    transferred, first, second = sample(trial)
                except (Refused, Useless, OSError) as problem:
                    failures.append(str(problem))
                    print(f"   {name}: a failure: {problem}", flush=True)
                    continue
                if attempts > WARM_UP:
                    added.append(transferred - first)
                    error.append(second - first)
                    with_transfer.append(transferred)
                    plain.append(first)
        finally:
            pair.stop()
    result = dict(connector=name, tokens=TOKENS, samples=len(added), failures=len(failures), attempts=attempts, added_ms=quartiles(added),
                with_transfer_ms=quartiles(with_transfer), plain_ms=quartiles(plain), plain_again_ms=quartiles(error), reasons=sorted(set(failures))[:5])
    print(f"   {name}: {json.dumps(result)}", flush=True)
    return result


def sample(trial):
    """Seconds that decode took with the transfer, without, and without once more."""
    prompt = trial.prompt(TOKENS)
    transfer = trial.prefilled(prompt)
    one, external = asked(trial, prompt, transfer, "external_kv_transfer")
    two, held = asked(trial, prompt, None, "local_cache_hit")
    three, again = asked(trial, prompt, None, "local_cache_hit")
    if external < TOKENS - 1:
        raise Useless(f"only {external} of {TOKENS} tokens came from prefill")
    if min(held, again) < TOKENS - 1:
        raise Useless(f"only {min(held, again)} of {TOKENS} tokens were in decode's prefix cache")
    if not one.tokens == two.tokens == three.tokens or abs(one.logprobs[0] - two.logprobs[0]) > TOLERANCE:
        raise Useless("the answer after the transfer was another than with the prefix cache")
    return one.seconds, two.seconds, three.seconds


def asked(trial, prompt, transfer, source):
    """Decode's answer, and how many of the prompt's tokens came from this source."""
    before = metrics.Since(trial.decode)
    answer = complete(trial.decode, prompt, 1, transfer, REQUEST_LIMIT_S)
    return answer, before.wait(metrics.BY_SOURCE, 1, 1, source=source)


def quartiles(seconds):
    """Lower quartile, median and upper quartile in milliseconds."""
    if len(seconds) < 2:
        return None
    return [round(1000 * value, 2) for value in statistics.quantiles(seconds, n=4, method="inclusive")]


def table(results):
    print()
    print(f"A hand-over of {TOKENS} tokens, added to a request: median (quartiles) in ms")
    print(f"{'connector':<12}{'samples':>8}{'failures':>9}   {'added':<26}{'with transfer':<26}{'without':<26}{'without, again, less without':<26}")
    for result in results:
        columns = "".join(f"{shown(result[key]):<26}" for key in ("added_ms", "with_transfer_ms", "plain_ms", "plain_again_ms"))
        print(f"{result['connector']:<12}{result['samples']:>8}{result['failures']:>9}   {columns}")
    print()


def shown(three):
    return f"{three[1]:.1f} ({three[0]:.1f} - {three[2]:.1f})" if three else "-"
