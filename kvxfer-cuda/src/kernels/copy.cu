// Many small pieces between device memory and one page-locked staging buffer, in one launch.
//
// generate.sh makes copy.ptx of this; the driver compiles that for its device when it is loaded. One launch of each
// kernel at a time and module: the counters of finished blocks are the module's.

struct Piece {
    unsigned long long device; // address
    unsigned long long offset; // in the staging buffer
    unsigned long long length; // bytes
};

__device__ unsigned gather_blocks_done;
__device__ unsigned scatter_blocks_done;

// A block copies one run. Words of 16 bytes, four at a time, where addresses and length allow it: enough reads under way
// to fill a link whose latency is a microsecond.
__device__ void copy(unsigned char *to, const unsigned char *from, unsigned long long length) {
    const unsigned long long step = blockDim.x;
    unsigned long long at = threadIdx.x;
    const unsigned long long shape = (unsigned long long)to | (unsigned long long)from | length;
    if (shape % 16 == 0) {
        uint4 *out = (uint4 *)to;
        const uint4 *in = (const uint4 *)from;
        const unsigned long long words = length / 16;
        for (; at + 3 * step < words; at += 4 * step) {
            const uint4 a = in[at], b = in[at + step], c = in[at + 2 * step], d = in[at + 3 * step];
            out[at] = a;
            out[at + step] = b;
            out[at + 2 * step] = c;
            out[at + 3 * step] = d;
        }
        for (; at < words; at += step) {
            out[at] = in[at];
        }
    } else if (shape % 4 == 0) {
        unsigned *out = (unsigned *)to;
        const unsigned *in = (const unsigned *)from;
        for (; at < length / 4; at += step) {
            out[at] = in[at];
        }
    } else {
        for (; at < length; at += step) {
            to[at] = from[at];
        }
    }
}

// The last block to finish says so: it writes `value` to `done`, a word in page-locked memory. Who reads it there (acquire)
// sees everybody's bytes, on the host and on the device. By the memory consistency model of the PTX ISA:
//
//  1. A thread's fence comes after its stores. It is sequentially consistent, for the whole system (CUDA C++ Programming Guide,
//     "Memory Fence Functions"; membar.sys is fence.sc.sys).
//  2. It comes before its block's count in causality order: by program order up to the barrier, which synchronizes, and on.
//  3. All blocks' counts are atomic operations at one place, so they are in one order; the last one gets the highest number.
//     Its thread's second fence therefore comes after each first fence in the one order of fences ("Fence-SC"): the other way
//     round they would synchronize, and the last count would come before one that it has seen.
//  4. So each first fence synchronizes with the second, and what came before the first comes before the write behind the
//     second ("causality order" is transitive). That write is strong: volatile is relaxed at the scope of the system. A fence
//     and a strong write behind it are a release pattern.
//
// The Guide's example of these functions counts blocks in the same way. A kernel that fails never counts its last block.
// The highest number makes zero of the counter, for the next launch: launches of one stream do not overlap.
__device__ void finish(unsigned *blocks_done, unsigned *done, unsigned value) {
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(blocks_done, gridDim.x - 1) == gridDim.x - 1) {
        __threadfence_system();
        *(volatile unsigned *)done = value;
    }
}

extern "C" __global__ void kvx_gather(const Piece *pieces, unsigned count, unsigned char *staging, unsigned *done,
                                      unsigned value) {
    for (unsigned at = blockIdx.x; at < count; at += gridDim.x) {
        const Piece piece = pieces[at];
        copy(staging + piece.offset, (const unsigned char *)piece.device, piece.length);
    }
    finish(&gather_blocks_done, done, value);
}

extern "C" __global__ void kvx_scatter(const Piece *pieces, unsigned count, unsigned char *staging, unsigned *done,
                                       unsigned value) {
    for (unsigned at = blockIdx.x; at < count; at += gridDim.x) {
        const Piece piece = pieces[at];
        copy((unsigned char *)piece.device, staging + piece.offset, piece.length);
    }
    finish(&scatter_blocks_done, done, value);
}
