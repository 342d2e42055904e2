// Numbers that are kept from overflow, but for those that were infinite as given.
#pragma once
#include "ptx.cuh"

// A product that overflows is kept at the largest number of bfloat16: a state or a value of 0 stays
// 0 under it, as it does step by step, where infinity would make NaN of it. NaN stays NaN.
constexpr float kLargest = 3.3895314e38f;

__device__ __forceinline__ float bounded(float x) { return clamp(x, kLargest); }
__device__ __forceinline__ double bounded(double x) {
  return x > double(kLargest) ? double(kLargest) : (x < -double(kLargest) ? -double(kLargest) : x);
}
// The same where products may overflow.
template <bool kWild>
__device__ __forceinline__ float kept(float x) {
  return kWild ? bounded(x) : x;
}
// x, or NaN where it is infinite, which shows in whatever is made of it, bounded or not.
template <class T>
__device__ __forceinline__ T nan_if_infinite(T x) {
  return x + (x - x);
}
// The same where products with it are bounded.
template <bool kWild, class T>
__device__ __forceinline__ T given(T x) {
  return kWild ? nan_if_infinite(x) : x;
}
// weight x, or NaN where x is infinite.
__device__ __forceinline__ float weighed(float weight, float x) { return weight * x + (x - x); }
