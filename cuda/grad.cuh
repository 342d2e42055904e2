// One call for gradients as every kernel gets it, beside CallArgs: there y takes the gradient of v,
// state that of initial_state; and the last kernel, which adds partial sums up.
#pragma once
#include "call.cuh"

// Partial gradients are kept in the type that sums are made in, each for kColBlocks column blocks.
struct GradArgs {
  const void* dy;              // (B, T, H, V), or null
  const void* dstate;          // (N, H, K, V) with any strides, or null
  long long dy_stride[3];      // over (B, T, H); the last axis has stride 1
  long long dstate_stride[4];  // over (N, H, K, V)
  void *dq, *dk, *dgate,
      *dbeta;    // in the shapes of q, k, gate and beta, contiguous; null if absent
  void* states;  // as the kernel likes them
  void* misses;  // (B, T, H, V): v - k^T R of the delta rule
  void *partial_dq, *partial_dk;  // (column blocks, B, T, H, K), before normalisation
  void* partial_scalars;          // (column blocks, B, T, H, 2): of the gate itself, and of beta
  long long B;
};

// Into an array of the type that a gate or beta of this kind has.
template <class In, class Sum>
__device__ __forceinline__ void put_scalar(void* to, long long at, Sum x, int kind) {
  if (kind == kAsInputs || kind == kLogOfInputs)
    static_cast<In*>(to)[at] = Narrow<In>::from(x);
  else if (kind != kAbsent)
    static_cast<float*>(to)[at] = Narrow<float>::from(x);
}

// Sums over column blocks and over the heads that share q and k, in a fixed order; the way through
// x / |x|; gate dgate for log gates; zeros for tokens outside all sequences.
// grid: any number of blocks. A warp takes one row (b, t, query head) at a time.
template <class In, class Sum, bool kNormalise, int K, int kColBlocks>
__global__ void __launch_bounds__(256, 1) finish_grad(const CallArgs a, const GradArgs g) {
  constexpr int kEach = (K + 31) / 32;
  const int lane = threadIdx.x % 32;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  const long long heads = a.H / a.group, rows = g.B * a.T * heads;
  const long long step = g.B * a.T * a.H;  // from one column block to the next, in rows
  const long long first = sequence(a, 0).start, last = sequence(a, a.N - 1).stop;
  long long row = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  for (; row < rows; row += warps) {
    const long long b = row / heads / a.T, t = row / heads % a.T, hq = row % heads;
    const long long at = (b * a.T + t) * a.H + hq * a.group;  // of the first value head
    const bool real = t >= first && t < last;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      const Sum* const parts = static_cast<const Sum*>(which ? g.partial_dk : g.partial_dq);
      Sum d[kEach] = {};
      if (real)
        for (long long h = 0; h < a.group; h++)
          for (int c = 0; c < kColBlocks; c++)
#pragma unroll
            for (int i = 0; i < kEach; i++)
              if (lane + 32 * i < K) d[i] += parts[(c * step + at + h) * K + lane + 32 * i];
      if (kNormalise) {
        const long long* const stride = which ? a.k_stride : a.q_stride;
        const In* const from = static_cast<const In*>(which ? a.k : a.q) + b * stride[0] +
                               t * stride[1] + hq * stride[2];
        Sum x[kEach], squares = 0, along = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) {
          x[i] = lane + 32 * i < K ? widen<Sum>(from[lane + 32 * i]) : Sum(0);
          squares += x[i] * x[i];
          along += x[i] * d[i];
        }
#pragma unroll
        for (int hop = 1; hop < 32; hop *= 2) {
          squares += __shfl_xor_sync(0xffffffffu, squares, hop);
          along += __shfl_xor_sync(0xffffffffu, along, hop);
        }
        const Sum inverse = Sum(1) / sqrt(squares + Sum(1e-6));
        along *= inverse * inverse;
#pragma unroll
        for (int i = 0; i < kEach; i++) d[i] = inverse * (d[i] - along * x[i]);
      }
      In* const to = static_cast<In*>(which ? g.dk : g.dq) + row * K;
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (lane + 32 * i < K) to[lane + 32 * i] = Narrow<In>::from(real ? d[i] : Sum(0));
    }
    for (long long h = lane; h < a.group; h += 32) {
      Sum dgate = 0, dbeta = 0;
      if (real)
        for (int c = 0; c < kColBlocks; c++) {
          const Sum* const pair =
              static_cast<const Sum*>(g.partial_scalars) + 2 * (c * step + at + h);
          dgate += pair[0];
          dbeta += pair[1];
        }
      if (real && (a.gate_kind == kLogOfInputs || a.gate_kind == kLogOfFloat)) {
        Scalar<In> gate;
        const long long head = hq * a.group + h;
        gate.load(a.gate, b * a.gate_stride[0] + t * a.gate_stride[1] + head * a.gate_stride[2],
                  a.gate_kind);
        dgate = exact_product(gate.template value<Sum>(a.gate_kind), dgate);
      }
      put_scalar<In>(g.dgate, at + h, dgate, a.gate_kind);
      put_scalar<In>(g.dbeta, at + h, dbeta, a.beta_kind);
    }
  }
}
