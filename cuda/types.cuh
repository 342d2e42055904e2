// Storage types of the arrays, and the way from them to the type that sums are made in and back.
#pragma once
#include "ptx.cuh"

struct half_t {
  unsigned short bits;
};

struct bfloat16_t {
  unsigned short bits;
};

// n neighbours in memory, moved at once; n * sizeof(T) is at most 16.
template <class T, int n>
struct alignas(sizeof(T) * n) Run {
  T x[n];
};

template <class State>
__device__ __forceinline__ State widen(half_t x) {
  return half_bits_to_float(x.bits);
}
template <class State>
__device__ __forceinline__ State widen(bfloat16_t x) {
  return bfloat16_bits_to_float(x.bits);
}
template <class State>
__device__ __forceinline__ State widen(float x) {
  return x;
}
template <class State>
__device__ __forceinline__ State widen(double x) {
  return static_cast<State>(x);
}

template <class Out>
struct Narrow;
template <>
struct Narrow<half_t> {
  static __device__ __forceinline__ half_t from(float x) { return {float_to_half_bits(x)}; }
};
template <>
struct Narrow<bfloat16_t> {
  static __device__ __forceinline__ bfloat16_t from(float x) { return {float_to_bfloat16_bits(x)}; }
};
template <>
struct Narrow<float> {
  static __device__ __forceinline__ float from(double x) { return static_cast<float>(x); }
  static __device__ __forceinline__ float from(float x) { return x; }
};
template <>
struct Narrow<double> {
  static __device__ __forceinline__ double from(double x) { return x; }
};

// What states are stored as in global memory, by the type of q, k and v.
template <class In>
struct Storage {
  using State = float;
};
template <>
struct Storage<double> {
  using State = double;
};
