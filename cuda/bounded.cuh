// Products of gates that do not overflow.
#pragma once
#include "ptx.cuh"

// A product that overflows is kept at the largest number of bfloat16: a state or a value of 0 stays
// 0 under it, as it does step by step, where infinity would make NaN of it. NaN stays NaN.
constexpr float kLargest = 3.3895314e38f;

__device__ __forceinline__ float bounded(float x) { return clamp(x, kLargest); }
__device__ __forceinline__ double bounded(double x) {
  return x > double(kLargest) ? double(kLargest) : (x < -double(kLargest) ? -double(kLargest) : x);
}
