// How a warp tells others, through a barrier in shared memory, that it has done with something.
#pragma once
#include "ptx.cuh"

// Lanes of a warp that arrive at a barrier in its name. All of them do for compute-sanitizer's
// racecheck, which takes what a thread has done as ordered only where that thread itself arrives.
#ifdef EVERY_LANE_ARRIVES
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif

__device__ __forceinline__ void init_for_warps(Barrier& barrier, int warps) {
  barrier.init(kArriving * warps);
}
// By a warp whose lanes have met since they have done with what the barrier is for.
__device__ __forceinline__ void arrive_together(Barrier& barrier, int lane) {
  if (kArriving == 32 || lane == 0) barrier.arrive();
}
// By a warp whose lanes have all done with what the barrier is for.
__device__ __forceinline__ void arrive(Barrier& barrier, int lane) {
  __syncwarp();
  arrive_together(barrier, lane);
}
