"""Hand-overs from Python, measured as `kvxfer-bench run` measures them from Rust.

    python ffi/python/benches/handover.py --workload w2,w3,w5 --verify
    python ffi/python/benches/handover.py --against target/release/kvxfer-bench

The same pools, block ids and windows: two processes over TCP on loopback, a pool of `--pool-bytes` in touched 4 KiB
pages on each side, one push from the submitting call until the library says that the bytes are in place. The grant is
made and passed on before. Before each repetition every 64 KiB (or block) of every source block gets a fresh stamp; after
the end was reported the destination looks for all of them.

With `--against` the repetitions of the two programs alternate (A B A B ...), the one idle while the other runs.
`ratio_to_rust` is the ratio of the median speeds, `ratio_quartiles` are the quartiles of the ratios of neighbours.

`post_us` is the median of the submitting call on the caller's thread with a `kvxfer.Selection` made before, as in Rust;
`post_list_us` with a tuple of plain integers, `(0, tokens, [ids])`, turned into a selection by the call. Repetitions take
turns with these.

`--submit ROUNDS` measures only the submitting calls, back to back: a grant at one endpoint and a push into it at another, in one
process, cancelled once they were timed, so that caches hold the library's data and not a request's.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time

import kvxfer

SCATTER_SEED = 20_240_607
MASK = (1 << 64) - 1
STAMP_FACTOR = 0xD6E8_FEB8_6659_FD93
STAMP_UNIT_BYTES = 64 << 10
POISON = 0xA5A5_A5A5_A5A5_A5A5
WAIT = 60.0
# Repetitions below which disturbed ones count too.
CLEAN_MIN = 5
# Cores that others may use during a repetition before it counts as disturbed.
FOREIGN_CORES_MAX = 0.25


class SplitMix64:
    """The generator of the Rust benchmark: the same seed gives the same blocks."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E37_79B9_7F4A_7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & MASK
        return z ^ (z >> 31)

    def permutation(self, of, take):
        numbers = list(range(of))
        for index in range(min(take, of)):
            other = index + self.next() % (of - index)
            numbers[index], numbers[other] = numbers[other], numbers[index]
        return numbers[:take]


class Work:
    """What a named workload moves."""

    def __init__(self, name, pool_bytes):
        planes, block_bytes, wanted = {
            "w2": (1, 64 << 10, 4096),
            "w3": (1, 4 << 10, 16_384),
            "w5": (160, 8 << 10, 128),
        }[name]
        blocks = (pool_bytes * 768) >> 30 if name == "w5" else pool_bytes // block_bytes
        count = min(wanted, blocks // 2 if name == "w5" else blocks // 4)
        if count == 0:
            raise SystemExit(f"{name} does not fit a pool of {pool_bytes} bytes: give more --pool-bytes")
        random = SplitMix64(SCATTER_SEED)
        self.name, self.planes, self.block_bytes, self.blocks = name, planes, block_bytes, blocks
        self.source = random.permutation(blocks, count)
        self.destination = random.permutation(blocks, count)
        self.pieces = count * planes
        self.bytes = self.pieces * block_bytes
        self.unit = STAMP_UNIT_BYTES if block_bytes % STAMP_UNIT_BYTES == 0 else block_bytes
        if name == "w5":
            self.layout = kvxfer.Layout.preset("llama-3.1-70b", size=4, tokens_per_block=16, blocks=blocks)
            self.tokens_per_block = 16
        else:
            self.layout = kvxfer.Layout.opaque(block_bytes, blocks)
            self.tokens_per_block = 1

    def selection(self, blocks):
        return kvxfer.Selection(0, len(blocks) * self.tokens_per_block, blocks)

    def offsets(self, blocks):
        """Where pieces begin in the region, in the order of the stream: plane by plane."""
        size, per_plane = self.block_bytes, self.blocks
        return [(plane * per_plane + block) * size for plane in range(self.planes) for block in blocks]

    def units(self, blocks):
        """The words that carry stamps."""
        steps = range(0, self.block_bytes, self.unit)
        return [(offset + step) // 8 for offset in self.offsets(blocks) for step in steps]


def stamp(word, unit, epoch):
    return ((word * 8 // unit) * STAMP_FACTOR & MASK) ^ ((epoch + 1) << 40)


def pattern(offset):
    """What the source holds in the block at this offset, apart from stamps."""
    return (offset * 0x9E37_79B9_7F4A_7C15 + 11) & MASK


class Side:
    """One process: memory, an endpoint, and the pool of the current workload."""

    def __init__(self, name, pool_bytes):
        self.memory = mmap.mmap(-1, pool_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_NOHUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages has 4 KiB ones
        self.bytes = memoryview(self.memory)
        self.words = self.bytes.cast("Q")
        self.endpoint = kvxfer.Endpoint(name=name, listen="127.0.0.1:0", transports=["tcp"])
        self.pool = None

    def take(self, work, is_source):
        if self.pool is not None:
            self.pool.close_wait(5.0)
        step = work.block_bytes
        for offset in range(0, len(self.bytes) - step + 1, step):
            word = pattern(offset) if is_source else POISON
            self.bytes[offset : offset + step] = word.to_bytes(8, sys.byteorder) * (step // 8)
        self.pool = self.endpoint.register(work.layout, [self.memory], role="both")

    def check_everything(self, work, epoch):
        """Checks every block of a destination: what was moved, and that all else is as it was."""
        came_from = dict(zip(work.offsets(work.destination), work.offsets(work.source)))
        step = work.block_bytes
        untouched = POISON.to_bytes(8, sys.byteorder) * (step // 8)
        for offset in range(0, len(self.bytes) - step + 1, step):
            origin = came_from.get(offset)
            expected = untouched
            if origin is not None:
                content = bytearray(pattern(origin).to_bytes(8, sys.byteorder) * (step // 8))
                for inside in range(0, step, work.unit):
                    value = stamp((origin + inside) // 8, work.unit, epoch)
                    content[inside : inside + 8] = value.to_bytes(8, sys.byteorder)
                expected = content
            if self.bytes[offset : offset + step] != expected:
                return f"the block at byte {offset} is wrong (moved: {origin is not None})"
        return None


def target():
    """The child: makes grants and looks at what arrives, as its parent asks."""
    side = work = handle = marked = None
    sources = destinations = []
    for line in sys.stdin:
        ask = json.loads(line)
        answer = {}
        if ask["do"] == "start":
            side = Side("target", ask["pool_bytes"])
            answer["address"] = str(side.endpoint.address)
        elif ask["do"] == "work":
            handle = None
            work = Work(ask["name"], len(side.bytes))
            side.take(work, is_source=False)
            sources, destinations = work.units(work.source), work.units(work.destination)
        elif ask["do"] == "grant":
            handle = side.pool.grant(work.selection(work.destination))
            answer["grant"] = bytes(handle.grant).hex()
        elif ask["do"] == "mark":
            print(json.dumps(answer), flush=True)
            marked = time.process_time()
            continue
        elif ask["do"] == "end":
            answer["cpu"] = time.process_time() - marked
            words, unit, epoch = side.words, work.unit, ask["epoch"]
            wanted = [stamp(word, unit, epoch) for word in sources]
            answer["late"] = [words[at] for at in destinations] != wanted
            handle.wait(10.0)
        elif ask["do"] == "check":
            answer["wrong"] = side.check_everything(work, ask["epoch"])
        print(json.dumps(answer), flush=True)


class Line:
    """A child process that is asked in lines of JSON."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def ask(self, **ask):
        return self.send(json.dumps(ask))

    def send(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.receive()

    def receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args[0]} ended with {self.process.wait()}: see above")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        try:
            return self.process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def busy_seconds():
    """Processor seconds used by anyone since the machine started."""
    with open("/proc/stat") as stat:
        fields = [float(field) for field in stat.readline().split()[1:]]
    # user, nice, system, irq, softirq, steal
    return sum(fields[at] for at in (0, 1, 2, 5, 6, 7)) / os.sysconf("SC_CLK_TCK")


class Bench:
    """The initiator and its target."""

    def __init__(self, pool_bytes):
        self.side = Side("initiator", pool_bytes)
        self.target = Line([sys.executable, __file__, "--target"])
        address = self.target.ask(do="start", pool_bytes=pool_bytes)["address"]
        self.endpoint = self.side.endpoint
        self.address = kvxfer.EndpointAddress(address)
        self.endpoint.connect(self.address)
        self.epoch = 0

    def take(self, name):
        work = Work(name, len(self.side.bytes))
        self.side.take(work, is_source=True)
        self.target.ask(do="work", name=name)
        self.work, self.stamped = work, work.units(work.source)
        self.selection = work.selection(work.source)

    def repetition(self, as_list):
        self.epoch += 1
        words, unit, epoch = self.side.words, self.work.unit, self.epoch
        for word in self.stamped:
            words[word] = stamp(word, unit, epoch)
        grant = kvxfer.Grant.from_bytes(bytes.fromhex(self.target.ask(do="grant")["grant"]))
        source = self.selection
        if as_list:
            source = (0, len(self.work.source) * self.work.tokens_per_block, list(self.work.source))
        endpoint, pool, clock = self.endpoint, self.side.pool, time.perf_counter_ns
        self.target.ask(do="mark")
        busy, cpu, post_cpu = busy_seconds(), time.process_time(), time.thread_time_ns()
        begun = clock()
        transfer = endpoint.push(pool, source, grant)
        posted = clock()
        post_cpu = time.thread_time_ns() - post_cpu
        transfer.wait(WAIT)
        seconds = (clock() - begun) / 1e9
        cpu = time.process_time() - cpu
        end = self.target.ask(do="end", epoch=epoch)
        foreign = busy_seconds() - busy - cpu - end["cpu"]
        return {
            "seconds": seconds,
            "post_us": (posted - begun) / 1e3,
            "post_cpu_us": post_cpu / 1e3,
            "as_list": as_list,
            "cpu_initiator": cpu,
            "cpu_target": end["cpu"],
            "late": end["late"],
            "disturbed": max(foreign, 0.0) > FOREIGN_CORES_MAX * seconds + 0.02,
        }

    def wrong(self):
        return self.target.ask(do="check", epoch=self.epoch)["wrong"]

    def transport(self):
        peers = self.endpoint.peers()
        return peers[0].transport if peers else None

    def close(self):
        self.target.close()
        self.endpoint.close(2.0)


def counted(reps):
    """The repetitions that count: the clean ones if there are enough."""
    clean = [rep for rep in reps if not rep["disturbed"]]
    return clean if len(clean) >= CLEAN_MIN else reps


def median_of(reps, key):
    return statistics.median(rep[key] for rep in reps)


def quantile(values, part):
    values = sorted(values)
    at = part * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def row(work, reps, transport, wrong, verify):
    good = counted(reps)
    seconds = median_of(good, "seconds")
    gigabytes = work.bytes * len(good) / 1e9

    def gbps(seconds):
        return round(work.bytes / seconds / 1e9, 3)

    def post(as_list, key="post_us"):
        values = [rep[key] for rep in reps if rep["as_list"] == as_list]
        return round(statistics.median(values), 2) if values else None

    return {
        "peer": "kvxfer-python",
        "version": kvxfer.__version__,
        "transport": transport,
        "workload": work.name,
        "direction": "write",
        "gbps": gbps(seconds),
        "descs_per_s": round(work.pieces / seconds),
        "p50_us": round(seconds * 1e6, 2),
        "p99_us": round(max(rep["seconds"] for rep in good) * 1e6, 2),
        "cpu_s_per_gb_initiator": round(sum(rep["cpu_initiator"] for rep in good) / gigabytes, 4),
        "cpu_s_per_gb_target": round(sum(rep["cpu_target"] for rep in good) / gigabytes, 4),
        "verified": (wrong is None and not any(rep["late"] for rep in reps)) if verify else None,
        "late_reps": sum(rep["late"] for rep in reps),
        "gbps_best": gbps(min(rep["seconds"] for rep in good)),
        "gbps_worst": gbps(max(rep["seconds"] for rep in good)),
        "post_us": post(False),
        "post_list_us": post(True),
        "post_cpu_us": post(False, "post_cpu_us"),
        "reps": len(reps),
        "reps_clean": sum(not rep["disturbed"] for rep in reps),
        "bytes": work.bytes,
        "pieces": work.pieces,
    }


def measure(bench, names, arguments):
    rust = None
    if arguments.against:
        command = [arguments.against, "run", "--transport", "tcp", "--json", "--paced", "--patience", "0"]
        command += ["--workload", ",".join(names), "--pool-bytes", str(arguments.pool_bytes)]
        command += ["--reps", str(arguments.reps), "--warm", str(arguments.warm)]
        rust = Line(command + (["--verify"] if arguments.verify else []))
    good = True
    for name in names:
        bench.take(name)
        reps, theirs = [], []
        for number in range(arguments.warm + arguments.reps):
            if rust is not None:
                theirs.append(rust.send(""))
            reps.append(bench.repetition(as_list=number % 2 == 1))
        reps, theirs = reps[arguments.warm :], theirs[arguments.warm :]
        wrong = bench.wrong() if arguments.verify else None
        result = row(bench.work, reps, bench.transport(), wrong, arguments.verify)
        if wrong is not None:
            result["error"] = wrong
        if rust is not None:
            # Pairs: a disturbance that lasts hits both, so that all of them count.
            speed = median_of(theirs, "seconds") / median_of(reps, "seconds")
            pairs = [there["seconds"] / here["seconds"] for here, there in zip(reps, theirs)]
            result["ratio_to_rust"] = round(speed, 3)
            result["ratio_quartiles"] = [round(quantile(pairs, part), 3) for part in (0.25, 0.75)]
            print(json.dumps(rust.receive()))
        print(json.dumps(result), flush=True)
        good = good and result["late_reps"] == 0 and wrong is None
    if rust is not None:
        good = rust.close() == 0 and good
    return good


def size(text):
    for suffix, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if text.endswith(suffix):
            return int(text[: -len(suffix)]) * factor
    return int(text)


def submits(rounds, pool_bytes):
    """The submitting calls of w5 alone, back to back."""
    pool_bytes = min(pool_bytes, 512 << 20)
    source, destination = Side("source", pool_bytes), Side("destination", pool_bytes)
    work = Work("w5", pool_bytes)
    for side in (source, destination):
        side.take(work, is_source=False)
    source.endpoint.connect(destination.endpoint.address)
    target = work.selection(work.destination)
    as_tuple = (0, len(work.source) * work.tokens_per_block, list(work.source))
    print(f"{'w5':10} {'blocks':>8} {'grant us':>10} {'push us':>10}")
    for name, blocks in (("selection", work.selection(work.source)), ("tuple", as_tuple)):
        grants, pushes, clock = [], [], time.perf_counter_ns
        for _ in range(rounds):
            begun = clock()
            handle = destination.pool.grant(target)
            granted = clock()
            grant = handle.grant
            again = clock()
            transfer = source.endpoint.push(source.pool, blocks, grant)
            pushes.append((clock() - again) / 1e3)
            grants.append((granted - begun) / 1e3)
            transfer.cancel()
            handle.cancel()
            for ended in (transfer, handle):
                try:
                    ended.wait(WAIT)
                except kvxfer.Error:
                    pass  # it was cancelled, or a small part of it was faster
        print(f"{name:10} {len(work.source):8} {statistics.median(grants):10.1f} {statistics.median(pushes):10.1f}")
    source.endpoint.close(2.0)
    destination.endpoint.close(2.0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="w2,w3,w5", help="w2, w3, w5, separated by commas")
    parser.add_argument("--pool-bytes", type=size, default=1 << 30, help="bytes of each pool, such as 1GiB")
    parser.add_argument("--reps", type=int, default=16, help="repetitions timed")
    parser.add_argument("--warm", type=int, default=3, help="repetitions before those")
    parser.add_argument("--verify", action="store_true", help="check every byte of the destination pool at the end")
    parser.add_argument("--against", metavar="PROGRAM", help="a kvxfer-bench to take turns with")
    parser.add_argument("--submit", type=int, metavar="ROUNDS", help="measure only the submitting calls, back to back")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.target:
        target()
        return 0
    if arguments.submit:
        submits(arguments.submit, arguments.pool_bytes)
        return 0
    bench = Bench(arguments.pool_bytes)
    try:
        good = measure(bench, arguments.workload.split(","), arguments)
    finally:
        bench.close()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
