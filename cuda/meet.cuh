// How two warps of a block wait for each other alone.
#pragma once
#include "arrive.cuh"

// By two warps that meet while the rest of the block, which passes by meet_beside_pairs, does not
// wait for them. For racecheck all meet: it loses the order that __syncthreads makes between those
// two and others.
__device__ __forceinline__ void meet_in_pairs(int barrier) {
  if (kArriving > 1)
    __syncthreads();
  else
    sync_threads<64>(barrier);
}
__device__ __forceinline__ void meet_beside_pairs() {
  if (kArriving > 1) __syncthreads();
}
