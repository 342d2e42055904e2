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

// Eight bytes in one go: a struct of two may be stored by halves.
__device__ __forceinline__ void put_two(void* to, unsigned low, unsigned high) {
  *static_cast<unsigned long long*>(to) = low | static_cast<unsigned long long>(high) << 32;
}

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
  static __device__ __forceinline__ unsigned pair(float low, float high) {
    return float_to_half_bits(low) | static_cast<unsigned>(float_to_half_bits(high)) << 16;
  }
  static __device__ __forceinline__ void unpair(unsigned x, float& low, float& high) {
    low = half_bits_to_float(static_cast<unsigned short>(x));
    high = half_bits_to_float(static_cast<unsigned short>(x >> 16));
  }
};
template <>
struct Narrow<bfloat16_t> {
  static __device__ __forceinline__ bfloat16_t from(float x) { return {float_to_bfloat16_bits(x)}; }
  static __device__ __forceinline__ unsigned pair(float low, float high) {
    return pack_bfloat16(low, high);
  }
  static __device__ __forceinline__ void unpair(unsigned x, float& low, float& high) {
    unpack_bfloat16(x, low, high);
  }
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

// Two neighbours in memory, rounded.
__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = {x, y};
}
__device__ __forceinline__ void store_pair(half_t* to, float x, float y) {
  *reinterpret_cast<unsigned*>(to) = pack_half(x, y);
}

// n neighbours in registers as they lie in memory: those of 16 bits two to a register where n is
// even.
template <class T, int n, bool kPairs = sizeof(T) == 2 && n % 2 == 0>
struct Packed {
  Run<T, n> raw;

  template <class State>
  __device__ __forceinline__ void read(State (&x)[n]) const {
#pragma unroll
    for (int i = 0; i < n; i++) x[i] = widen<State>(raw.x[i]);
  }
  template <class State>
  __device__ __forceinline__ void peek(State (&x)[n]) const {
    read(x);
  }
  template <class State>
  __device__ __forceinline__ void write(const State (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) raw.x[i] = Narrow<T>::from(x[i]);
  }
};

template <class T, int n>
struct Packed<T, n, true> {
  Run<unsigned, n / 2> raw;

  template <class State>
  __device__ __forceinline__ void read(State (&x)[n]) const {
#pragma unroll
    for (int i = 0; i < n; i++)
      x[i] = widen<State>(T{static_cast<unsigned short>(raw.x[i / 2] >> i % 2 * 16)});
  }
  // The same by other instructions. What was read one way twice the compiler would keep in between,
  // in twice the registers.
  template <class State>
  __device__ __forceinline__ void peek(State (&x)[n]) const {
#pragma unroll
    for (int i = 0; i < n; i += 2) Narrow<T>::unpair(raw.x[i / 2], x[i], x[i + 1]);
  }
  template <class State>
  __device__ __forceinline__ void write(const State (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) raw.x[i / 2] = Narrow<T>::pair(x[i], x[i + 1]);
  }
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
