// An engine's kernels for `kvxfer-bench gpu-check`: one produces blocks, late on purpose; one consumes them and counts the
// words that are not what they have to be. generate.sh of kvxfer-cuda makes blocks.ptx of this.

// The word `word` of a request's block `index`: every word of every request differs.
__device__ unsigned long long expected(unsigned long long seed, unsigned index, unsigned word) {
    unsigned long long value = seed + 0x9e3779b97f4a7c15ull * (((unsigned long long)index << 32) + word + 1);
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

__device__ unsigned long long now() {
    unsigned long long value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
}

// `blocks` names the `count` blocks, of `words` words each, `stride` words apart. Each thread block waits `wait_ns` first.
extern "C" __global__ void kvx_fill(unsigned long long *base, unsigned long long stride, const unsigned *blocks,
                                    unsigned count, unsigned words, unsigned long long seed,
                                    unsigned long long wait_ns) {
    const unsigned long long begin = now();
    while (now() - begin < wait_ns) {
    }
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        unsigned long long *block = base + stride * blocks[index];
        for (unsigned word = threadIdx.x; word < words; word += blockDim.x) {
            block[word] = expected(seed, index, word);
        }
    }
}

// Adds the number of wrong words to `*wrong`.
extern "C" __global__ void kvx_check(const unsigned long long *base, unsigned long long stride, const unsigned *blocks,
                                     unsigned count, unsigned words, unsigned long long seed,
                                     unsigned long long *wrong) {
    unsigned long long found = 0;
    for (unsigned index = blockIdx.x; index < count; index += gridDim.x) {
        const unsigned long long *block = base + stride * blocks[index];
        for (unsigned word = threadIdx.x; word < words; word += blockDim.x) {
            found += block[word] != expected(seed, index, word);
        }
    }
    if (found) {
        atomicAdd(wrong, found);
    }
}
