// Decays inside a chunk of 64 tokens: products of neighbouring gates and nothing else. No logarithm
// and no quotient is taken, so a gate of 0, a negative one or 1e-37 is as exact as any other.
#pragma once
#include "ptx.cuh"

constexpr int kChunk = 64;  // tokens
constexpr int kBlock = 16;  // tokens of a block, the height of a tensor-core tile
constexpr int kBlocks = kChunk / kBlock;
constexpr int kDiagonalRow = 20;  // floats, so that eight rows fall into different banks

// beta is multiplied into whatever weighs a token that is written.
struct alignas(16) Decay {
  float gate[kChunk], beta[kChunk];
  float from_start[kChunk];         // gates 0 to t
  float to_end[kChunk];             // gates t + 1 to 63, and beta of t
  float in_block[kChunk];           // gates from the start of t's block to t
  float to_block_end[kChunk];       // gates t + 1 to the end of t's block, and beta of t
  float between[kBlocks][kBlocks];  // [r][c]: all gates of the blocks between c and r, c < r
  float diagonal[kBlocks][kBlock][kDiagonalRow];  // [block][i][j]: gates j + 1 to i, beta of j
  float whole;                                    // all gates

  // All but the diagonal, by one warp; lane l brings tokens 2 l and 2 l + 1. Past the last token:
  // gate 1, beta 0.
  __device__ __forceinline__ void fill(int lane, float g0, float g1, float b0, float b1) {
    const int t = 2 * lane, in = lane % 8;  // a block is eight lanes
    float head = g0 * g1, tail = g0 * g1;   // products of pairs up to, and from, this lane's
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, head, step);
      const float after = __shfl_down_sync(0xffffffffu, tail, step);
      if (in >= step) head *= before;
      if (in + step < 8) tail *= after;
    }
    const float before = __shfl_up_sync(0xffffffffu, head, 1);
    const float after = __shfl_down_sync(0xffffffffu, tail, 1);
    const float start = in == 0 ? g0 : before * g0;
    const float end = in == 7 ? b1 : after * b1;
    const float end0 = (in == 7 ? g1 : after * g1) * b0;
    float total[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) total[b] = __shfl_sync(0xffffffffu, head, 8 * b + 7);
    const int block = lane / 8;
    float earlier = 1, later = 1;
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (b < block) earlier *= total[b];
      if (b > block) later *= total[b];
    }
    put(gate, t, g0, g1);
    put(beta, t, b0, b1);
    put(in_block, t, start, head);
    put(to_block_end, t, end0, end);
    put(from_start, t, earlier * start, earlier * head);
    put(to_end, t, later * end0, later * end);
    if (lane < kBlocks * kBlocks) {
      const int r = lane / kBlocks, c = lane % kBlocks;
      float product = 1;
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
        if (b > c && b < r) product *= total[b];
      between[r][c] = product;
    }
    if (lane == 0) whole = total[0] * total[1] * total[2] * total[3];
  }

  // The diagonal blocks, by one warp, of what fill left: two columns a lane, row by row.
  __device__ __forceinline__ void fill_diagonal(int lane) {
    const int block = lane / 8, j = lane % 8 * 2;
    const float b0 = beta[2 * lane], b1 = beta[2 * lane + 1];
    float g[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) g[i] = gate[block * kBlock + i];
    float d0 = 0, d1 = 0;
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      d0 = i == j ? b0 : (i > j ? d0 * g[i] : 0.f);
      d1 = i == j + 1 ? b1 : (i > j + 1 ? d1 * g[i] : 0.f);
      put(diagonal[block][i], j, d0, d1);
    }
  }

 private:
  static __device__ __forceinline__ void put(float* to, int t, float x0, float x1) {
    *reinterpret_cast<float2*>(to + t) = {x0, x1};
  }
};
