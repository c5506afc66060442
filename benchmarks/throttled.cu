// What stands for a network on one GPU. Compiled by one_gpu.py with nvcc into a library that ctypes loads. Time is taken from
// the clock of nanoseconds: one that counts cycles runs as fast as the GPU is clocked.
//
//     waiting     a thread that looks at the clock for so long
//     throttled   a copy by `blocks` resident blocks in no less than `total_ns`, in clusters of `cluster`: what a communication
//                 kernel takes from a GPU while it waits for its network. A block has the footprint of NCCL's (640 threads, 96
//                 registers), so that no other block of a large kernel fits beside it on its SM. Without bytes it only waits.
//     stamp       the time at which the stream came to here
#include <cstdint>

constexpr int kThreads = 640;
constexpr int kInFlight = 12;  // loads of a thread before its first store; they are most of the 96 registers

__device__ inline uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__global__ void wait_ns(uint64_t total_ns) {
    const uint64_t begin = nanoseconds();
    while (nanoseconds() - begin < total_ns) {}
}

__global__ void stamp_ns(uint64_t* at) { *at = nanoseconds(); }

// began: when each block got its SM; may be null.
__global__ void __launch_bounds__(kThreads, 1)
    throttled_copy(uint4* to, const uint4* from, uint64_t count, uint64_t total_ns, uint64_t* began) {
    const uint64_t begin = nanoseconds();
    if (began != nullptr && threadIdx.x == 0) began[blockIdx.x] = begin;
    const uint64_t stride = uint64_t(gridDim.x) * kThreads;
    for (uint64_t first = 0; first < count; first += stride * kInFlight) {
        const uint64_t mine = first + uint64_t(blockIdx.x) * kThreads + threadIdx.x;
        uint4 read[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (mine + i * stride < count) read[i] = from[mine + i * stride];
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (mine + i * stride < count) to[mine + i * stride] = read[i];
        }
        const uint64_t last = first + stride * kInFlight < count ? first + stride * kInFlight : count;
        const uint64_t due = begin + uint64_t(double(total_ns) * last / count);
        while (nanoseconds() < due) {}
    }
    while (nanoseconds() - begin < total_ns) {}
}

extern "C" int waiting(uint64_t ns, void* stream) {
    wait_ns<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(ns);
    return cudaGetLastError();
}

extern "C" int stamp(void* at, void* stream) {
    stamp_ns<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<uint64_t*>(at));
    return cudaGetLastError();
}

extern "C" int throttled(void* to, const void* from, uint64_t bytes, uint64_t total_ns, int blocks, int cluster, void* began,
                         void* stream) {
    cudaLaunchAttribute in_clusters{};
    in_clusters.id = cudaLaunchAttributeClusterDimension;
    in_clusters.val.clusterDim.x = cluster;
    in_clusters.val.clusterDim.y = in_clusters.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &in_clusters;
    config.numAttrs = cluster > 1 ? 1 : 0;  // before sm_90 there are no clusters
    return cudaLaunchKernelEx(&config, throttled_copy, static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / 16, total_ns,
                              static_cast<uint64_t*>(began));
}
