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

// The last block to finish says so, after everybody's bytes are visible to host and device.
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
