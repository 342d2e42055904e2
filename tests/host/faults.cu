// Small kernels that are right, or wrong in one way each: what the harness itself is tested with.
#include "simt.h"

// Reverses each block's part of x, through shared memory.
template <bool SYNC>
__global__ void reverse(const float* x, float* y) {
    DYNAMIC_SHARED(float, tile);
    const int first = blockIdx.x * blockDim.x;
    tile[threadIdx.x] = x[first + threadIdx.x];
    if (SYNC) __syncthreads();
    y[first + threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
