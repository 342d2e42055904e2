// Decays inside a chunk of 64 tokens: products of neighbouring gates and nothing else. No logarithm
// and no quotient is taken, so a gate of 0, a negative one or 1e-37 is as exact as any other.
#pragma once
#include "bounded.cuh"

constexpr int kChunk = 64;  // tokens
constexpr int kBlock = 16;  // tokens of a block, the height of a tensor-core tile
constexpr int kBlocks = kChunk / kBlock;
constexpr int kDiagonalRow = 20;  // floats, so that eight rows fall into different banks

constexpr float kWildProduct = 1.152921504606847e18f;  // 2^60

template <bool kWild>
__device__ __forceinline__ float times(float x, float y) {
  return kWild ? bounded(x * y) : x * y;
}

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
  int wild;                                       // whether products of gates may pass 2^60

  // All but the diagonal, by one warp; lane l brings tokens 2 l and 2 l + 1. Past the last token:
  // gate 1, beta 0.
  __device__ __forceinline__ void fill(int lane, float g0, float g1, float b0, float b1) {
    float peak = fmaxf(1.f, fabsf(g0)) * fmaxf(1.f, fabsf(g1));  // a gate of NaN counts as 1
    if (__any_sync(0xffffffffu, peak > 1.f))
#pragma unroll
      for (int step = 1; step < 32; step *= 2) peak *= __shfl_xor_sync(0xffffffffu, peak, step);
    if (lane == 0) wild = peak > kWildProduct;
    if (__builtin_expect(peak > kWildProduct, 0))
      fill_wild(lane, g0, g1, b0, b1);
    else
      fill<false>(lane, g0, g1, b0, b1);
  }

  // The diagonal blocks, by one warp, of what fill left: two columns a lane, row by row.
  __device__ __forceinline__ void fill_diagonal(int lane) {
    if (__builtin_expect(wild, 0))
      fill_diagonal_wild(lane);
    else
      fill_diagonal<false>(lane);
  }

 private:
  // Out of line and in loops: what is rare should not lie among what is not, nor take long to
  // compile.
  __device__ __noinline__ void fill_wild(int lane, float g0, float g1, float b0, float b1) {
    fill<true>(lane, g0, g1, b0, b1);
  }
  __device__ __noinline__ void fill_diagonal_wild(int lane) { fill_diagonal<true>(lane); }

  static __device__ __forceinline__ void put(float* to, int t, float x0, float x1) {
    *reinterpret_cast<float2*>(to + t) = {x0, x1};
  }

  template <bool kWild>
  __device__ __forceinline__ void fill(int lane, float g0, float g1, float b0, float b1) {
    const int t = 2 * lane, in = lane % 8;           // a block is eight lanes
    float head = times<kWild>(g0, g1), tail = head;  // of pairs up to, and from, this lane's
#pragma unroll(kWild ? 1 : 3)
    for (int step = 1; step < 8; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, head, step);
      const float after = __shfl_down_sync(0xffffffffu, tail, step);
      if (in >= step) head = times<kWild>(before, head);
      if (in + step < 8) tail = times<kWild>(tail, after);
    }
    const float before = __shfl_up_sync(0xffffffffu, head, 1);
    const float after = __shfl_down_sync(0xffffffffu, tail, 1);
    const float start = in == 0 ? g0 : times<kWild>(before, g0);
    const float end = in == 7 ? b1 : times<kWild>(after, b1);
    const float end0 = times<kWild>(in == 7 ? g1 : times<kWild>(after, g1), b0);
    float total[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) total[b] = __shfl_sync(0xffffffffu, head, 8 * b + 7);
    const int block = lane / 8;
    float earlier = 1, later = 1;
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (b < block) earlier = times<kWild>(earlier, total[b]);
      if (b > block) later = times<kWild>(later, total[b]);
    }
    put(gate, t, g0, g1);
    put(beta, t, b0, b1);
    put(in_block, t, start, head);
    put(to_block_end, t, end0, end);
    put(from_start, t, times<kWild>(earlier, start), times<kWild>(earlier, head));
    put(to_end, t, times<kWild>(end0, later), times<kWild>(end, later));
    if (lane < kBlocks * kBlocks) {
      const int r = lane / kBlocks, c = lane % kBlocks;
      float product = 1;
#pragma unroll
      for (int b = 0; b < kBlocks; b++)
        if (b > c && b < r) product = times<kWild>(product, total[b]);
      between[r][c] = product;
    }
    if (lane == 0) {
      whole = 1;
      for (int b = 0; b < kBlocks; b++) whole = times<kWild>(whole, total[b]);
    }
  }

  template <bool kWild>
  __device__ __forceinline__ void fill_diagonal(int lane) {
    const int block = lane / 8, j = lane % 8 * 2;
    const float b0 = beta[2 * lane], b1 = beta[2 * lane + 1];
    float d0 = 0, d1 = 0;
#pragma unroll(kWild ? 1 : kBlock / 4)
    for (int i0 = 0; i0 < kBlock; i0 += 4) {
      const float4 four = *reinterpret_cast<const float4*>(gate + block * kBlock + i0);
      const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int i = i0 + n;
        d0 = i == j ? b0 : (i > j ? times<kWild>(d0, g[n]) : 0.f);
        d1 = i == j + 1 ? b1 : (i > j + 1 ? times<kWild>(d1, g[n]) : 0.f);
        put(diagonal[block][i], j, d0, d1);
      }
    }
  }
};
