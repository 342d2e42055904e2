// A block of tokens on its way from global memory through registers into shared memory.
#pragma once
#include "call.cuh"

// First token of a block in the inputs, at one head; strides count elements from token to token.
template <class In>
struct Source {
  const In *q, *k, *v;
  const void *gate, *beta;
  long long gate_at, beta_at;  // elements
  long long q_stride, k_stride, v_stride, gate_stride, beta_stride;
  int gate_kind, beta_kind;  // Scalars

  __device__ __forceinline__ void advance(long long tokens) {
    q += tokens * q_stride;
    k += tokens * k_stride;
    v += tokens * v_stride;
    gate_at += tokens * gate_stride;
    beta_at += tokens * beta_stride;
  }
};

// kTokens tokens in shared memory, rows of q and k padded with zeros to kPaddedK.
template <class State, int kPaddedK, int kCols, int kTokens>
struct TokenSlot {
  static constexpr int kSize = kTokens * (2 * kPaddedK + kCols + 2);  // of State
  State* base;

  __device__ __forceinline__ State* q(int t) const { return base + t * kPaddedK; }
  __device__ __forceinline__ State* k(int t) const { return base + (kTokens + t) * kPaddedK; }
  __device__ __forceinline__ State* v(int t) const {
    return base + 2 * kTokens * kPaddedK + t * kCols;
  }
  __device__ __forceinline__ State* gate_beta(int t) const {  // a pair
    return base + kTokens * (2 * kPaddedK + kCols) + 2 * t;
  }
};

// What one of kThreads threads carries, kWide neighbours of a row at a time. Past the last token:
// gate 1, beta 0 and zeros, which leave a finite state as it is.
template <class In, class State, int K, int kPaddedK, int kCols, int kTokens, int kThreads,
          int kWide>
struct Fetch {
  using Slot = TokenSlot<State, kPaddedK, kCols, kTokens>;
  static constexpr int kKRuns = K / kWide, kVRuns = kCols / kWide;  // in a row
  static constexpr int kOfK = (kTokens * kKRuns + kThreads - 1) / kThreads;
  static constexpr int kOfV = (kTokens * kVRuns + kThreads - 1) / kThreads;
  static_assert(kTokens <= kThreads, "one thread fetches gate and beta of one token");
  static_assert(K % kWide == 0 && kCols % kWide == 0, "rows are whole runs, as those of v must be");
  Run<In, kWide> q[kOfK], k[kOfK], v[kOfV];
  Scalar<In> gate, beta;
  int tokens;

  __device__ __forceinline__ void load(const Source<In>& from, long long left, int cols) {
    tokens = static_cast<int>(left < kTokens ? left : kTokens);
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kOfK; i++) {
      const int e = i * kThreads + thread, t = e / kKRuns, at = e % kKRuns * kWide;
      q[i] = fetch(from.q + t * from.q_stride + at, t < tokens);
      k[i] = fetch(from.k + t * from.k_stride + at, t < tokens);
    }
#pragma unroll
    for (int i = 0; i < kOfV; i++) {
      const int e = i * kThreads + thread, t = e / kVRuns, at = e % kVRuns * kWide;
      v[i] = fetch(from.v + t * from.v_stride + at, t < tokens && at < cols);
    }
    if (thread < tokens) {
      gate.load(from.gate, from.gate_at + thread * from.gate_stride, from.gate_kind);
      beta.load(from.beta, from.beta_at + thread * from.beta_stride, from.beta_kind);
    }
  }

  __device__ __forceinline__ void store(Slot slot, const Source<In>& from) const {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = 0; i < kOfK; i++) {
      const int e = i * kThreads + thread, t = e / kKRuns, at = e % kKRuns * kWide;
      if (t < kTokens) {
        put<kPaddedK>(slot.q(t) + at, q[i]);
        put<kPaddedK>(slot.k(t) + at, k[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOfV; i++) {
      const int e = i * kThreads + thread, t = e / kVRuns, at = e % kVRuns * kWide;
      if (t < kTokens) put<kCols>(slot.v(t) + at, v[i]);
    }
    if (thread < kTokens) {
      const bool real = thread < tokens;
      slot.gate_beta(thread)[0] = real ? gate.template value<State>(from.gate_kind) : State(1);
      slot.gate_beta(thread)[1] = real ? beta.template value<State>(from.beta_kind) : State(0);
    }
  }

 private:
  static __device__ __forceinline__ Run<In, kWide> fetch(const In* at, bool real) {
    return real ? *reinterpret_cast<const Run<In, kWide>*>(at) : Run<In, kWide>{};
  }

  // Into a row of kRow numbers, in vectors as wide as its alignment allows.
  template <int kRow>
  static __device__ __forceinline__ void put(State* to, const Run<In, kWide>& run) {
    constexpr int kVector = 16 / sizeof(State);
    constexpr int kStep = kWide % kVector == 0 && kRow % kVector == 0 ? kVector : 1;
#pragma unroll
    for (int i = 0; i < kWide; i += kStep) {
      Run<State, kStep> part;
#pragma unroll
      for (int j = 0; j < kStep; j++) part.x[j] = widen<State>(run.x[i + j]);
      *reinterpret_cast<Run<State, kStep>*>(to + i) = part;
    }
  }
};
