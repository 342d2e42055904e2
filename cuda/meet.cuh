// How some warps of a block wait for each other alone.
#pragma once
#include "arrive.cuh"

// By kWarps warps that meet while the rest of the block, which passes by meet_beside, does not wait
// for them. For racecheck all meet: it loses the order that __syncthreads makes between those warps
// and others.
template <int kWarps>
__device__ __forceinline__ void meet_apart(int barrier) {
  if (kArriving > 1)
    __syncthreads();
  else
    sync_threads<32 * kWarps>(barrier);
}
__device__ __forceinline__ void meet_beside() {
  if (kArriving > 1) __syncthreads();
}
