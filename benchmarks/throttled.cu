// A copy by `blocks` resident blocks at no more than `bytes_per_us` together: what a communication kernel takes from a GPU
// while it waits for its network. Compiled by one_gpu.py with nvcc into a library that ctypes loads.
#include <cstdint>

__device__ inline uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__global__ void throttled_copy(uint4* to, const uint4* from, uint64_t count, uint64_t total_ns) {
    const uint64_t begin = nanoseconds();
    const uint64_t chunk = uint64_t(gridDim.x) * blockDim.x;
    for (uint64_t first = 0; first < count; first += chunk) {
        const uint64_t i = first + uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
        if (i < count) to[i] = from[i];
        const uint64_t last = first + chunk < count ? first + chunk : count;
        const uint64_t due = begin + uint64_t(double(total_ns) * last / count);
        while (nanoseconds() < due) {}
    }
}

extern "C" int throttled(void* to, const void* from, uint64_t bytes, uint64_t total_ns, int blocks, void* stream) {
    throttled_copy<<<blocks, 512, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<uint4*>(to), static_cast<const uint4*>(from), bytes / 16, total_ns);
    return cudaGetLastError();
}
