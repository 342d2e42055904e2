// Products of the gates of a chunk of 64 tokens, in blocks of 16, and what the gradients of gates
// are made of. All are products and sums of them: a gate of 0 or above 1 is as good as any other.
#pragma once
#include "grad_chunk.cuh"

constexpr int kGateRow = 20;  // floats, so that rows fall into different banks

// What is not numbers of the arrays. Warps of kParts parts of the columns have shares of each sum.
template <int kParts, int kRoles>
struct GradScalars {
  static constexpr int kWarps = kRoles * kParts * kBlocks;
  long long row, dv;  // of the chunk's first token: (b T + t) H + h, and where it has its dv
  float gates[kBlocks][kBlock * kGateRow];  // G_ij of a block by rows, 0 above the diagonal
  float from[kChunk], to[kChunk];           // within a token's own block
  float share[kChunk];                      // beta_j to_j
  float whole[kBlocks];                     // all gates of a block
  float gate[kChunk], beta[kChunk];
  float own[kChunk];             // of the gradient of a gate, for keys and queries of its block
  float after[kParts][kChunk];   // beta_j k_j . z_j / to_j of what follows the block of key j
  float before[kParts][kChunk];  // q_i . dq_i / from_i of what precedes the block of query i
  float dbeta[kParts][kChunk];
  // Inner products of what block c adds to the state at its end with what block r adds to that
  // state's gradient at its start over scale, at [c + 1][r]: the first row is of S, the last column
  // of E, without scale.
  float pair[kParts][kBlocks + 1][kBlocks + 1];
  float inner[kWarps];  // of S and E, by warp

  // All gates of the blocks between two.
  __device__ __forceinline__ float between(int low, int high) const {
    float product = 1;
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
      product = b > low && b < high ? bounded(product * whole[b]) : product;
    return product;
  }
  // By one warp: block w's, lane l with its gate and beta.
  __device__ __forceinline__ void fill(int w, float own_gate, float own_beta, int lane) {
    const bool column = lane < kBlock;  // of G; the next lane makes from
    const int first = column ? lane : -1, step = column ? kGateRow : 1;
    float* const target = column ? gates[w] + lane : from + w * kBlock;
    float d = column ? 0.f : 1.f;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      const float x = bounded(d * __shfl_sync(0xffffffffu, own_gate, i));
      d = i > first ? x : (i == first ? 1.f : 0.f);
      if (lane <= kBlock) target[i * step] = d;
    }
    if (lane == kBlock) whole[w] = d;
    if (!column) return;
    const int t = w * kBlock + lane;
    gate[t] = own_gate;
    beta[t] = own_beta;
    to[t] = d;
    share[t] = bounded(own_beta * d);
  }
};

// sum_{j < t <= i} G_{t-1,j} a_ij G_it for keys j and queries i of block w: the sum over i on
// tensor cores, the one over j in the warp.
template <class F, class Scalars>
__device__ __forceinline__ void add_gates(Scalars& s, const float (&a)[2][4], int w, int lane) {
  typename F::Left left;
  F::tiles(left, a);
  const float* const gates = s.gates[w];
  typename F::Right right[2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
      x[e] = gates[(lane % 4 * 2 + e % 2 + e / 2 * 8) * kGateRow + n * 8 + lane / 4];
    F::values(right[n], x);
  }
  float d[2][4] = {};
  F::multiply(d[0], d[1], left, right);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int t = n * 8 + lane % 4 * 2 + e;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int j = lane / 4 + 8 * i;
        if (j < t) sum += bounded(d[n][2 * i + e] * gates[(t - 1) * kGateRow + j]);
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane < 4) s.own[w * kBlock + t] = sum;
    }
}

// Gradients of the gates of block w, of token lane % 16, by one warp: sums over the block's keys,
// its queries and neither, under what lies beyond the block.
template <int kParts, int kRoles>
__device__ __forceinline__ float sum_gates(const GradScalars<kParts, kRoles>& s, float scale, int w,
                                           int lane) {
  const int c = lane / (kBlocks + 1) - 1, r = lane % (kBlocks + 1);
  float across = 0;
  if (c < w && r > w) {
    float gap = r < kBlocks ? scale : 1.f;
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
      if (b > c && b < r && b != w) gap = bounded(gap * s.whole[b]);
    if (c < 0 && r == kBlocks) {
#pragma unroll
      for (int i = 0; i < s.kWarps; i++) across += s.inner[i];
      across = nan_if_infinite(across);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; part++) across += s.pair[part][c + 1][r];
    }
    across = bounded(gap * across);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) across += __shfl_xor_sync(0xffffffffu, across, step);

  const bool of_keys = lane < kBlock;
  const int t = lane % kBlock, at = w * kBlock;
  const float* const gates = s.gates[w] + (of_keys ? max(t - 1, 0) * kGateRow : t);
  const int step = of_keys ? 1 : kGateRow;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    float x = 0;
#pragma unroll
    for (int part = 0; part < kParts; part++)
      x += of_keys ? s.after[part][at + i] : s.before[part][at + i];
    sum += gates[i * step] * x;
  }
  const float from = t ? s.from[at + t - 1] : 1.f, to = s.to[at + t];
  sum = of_keys && t == 0 ? 0.f : bounded(sum) * (of_keys ? to : from);
  sum += __shfl_xor_sync(0xffffffffu, sum, kBlock);
  return sum + bounded(from * to) * across + s.own[at + t];
}
