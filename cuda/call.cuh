// One call of either rule as every kernel of whole sequences gets it, and how its scalars are read.
#pragma once
#include "types.cuh"

enum Rule { kLinear = 0, kDelta = 1 };

// Strides count elements, over (B, T, H); the last axis of q, k, v and y has stride 1.
struct CallArgs {
  const void* q;              // (B, T, Hq, K)
  const void* k;              // (B, T, Hq, K)
  const void* v;              // (B, T, H, V)
  const void* gate;           // (B, T, H)
  const void* beta;           // (B, T, H)
  const void* initial_state;  // (N, H, K, V) with any strides, or null
  const void* cu_seqlens;     // (N + 1), or null: N = B sequences of T tokens
  void* y;                    // (B, T, H, V)
  void* state;                // (N, H, K, V) contiguous, or null
  long long q_stride[3], k_stride[3], v_stride[3], gate_stride[3], beta_stride[3], y_stride[3];
  long long state_stride[4];  // of initial_state
  long long offset_stride;    // of cu_seqlens
  long long T, H, group, N;   // group = H / Hq
  double scale;
  int gate_kind, beta_kind;  // Scalars
  int offset_bytes;          // 4 or 8: int32 or int64 cu_seqlens
  int padding;
};

// Tokens start to stop of batch entry b.
struct Sequence {
  long long b, start, stop;
};

// First or one past the last token of a sequence; offsets on the device were checked by nobody.
__device__ __forceinline__ long long offset(const CallArgs& a, long long n) {
  const long long at = n * a.offset_stride;
  const long long x = a.offset_bytes == 4 ? static_cast<const int*>(a.cu_seqlens)[at]
                                          : static_cast<const long long*>(a.cu_seqlens)[at];
  return x < 0 ? 0 : (x > a.T ? a.T : x);
}

__device__ __forceinline__ Sequence sequence(const CallArgs& a, long long n) {
  if (!a.cu_seqlens) return {n, 0, a.T};
  const long long start = offset(a, n), stop = offset(a, n + 1);
  return {0, start, stop > start ? stop : start};
}

// How gate or beta is stored.
enum Scalars { kAbsent = 0, kAsInputs = 1, kAsFloat = 2, kLogOfInputs = 3, kLogOfFloat = 4 };

// One gate or beta, held as it was stored until its value is asked for: using a load at once would
// stop the warp until memory answers.
template <class In>
struct Scalar {
  In narrow;
  float wide;

  __device__ __forceinline__ void load(const void* base, long long at, int kind) {
    if (kind == kAsInputs || kind == kLogOfInputs)
      narrow = static_cast<const In*>(base)[at];
    else if (kind != kAbsent)
      wide = static_cast<const float*>(base)[at];
  }

  template <class State>
  __device__ __forceinline__ State value(int kind) const {
    if (kind == kAbsent) return State(1);
    const State x = kind == kAsInputs || kind == kLogOfInputs ? widen<State>(narrow) : State(wide);
    return kind == kLogOfInputs || kind == kLogOfFloat ? exp(x) : x;
  }
};
