// Decays inside a chunk of 32 tokens: products of neighbouring gates and nothing else. They are
// made in double and rounded once, since equal gates make equal roundings, which would add up over
// the chunks of a long sequence. The decay of the whole chunk, which meets the state again and
// again, is kept as the sum of two floats.
#pragma once
#include "bounded.cuh"

constexpr int kChunk = 32;        // tokens
constexpr int kBlock = 16;        // tokens of a block, the height of a tensor-core tile
constexpr int kDiagonalRow = 20;  // floats, so that rows fall into different banks

constexpr float kWildProduct = 1.152921504606847e18f;  // 2^60

template <bool kWild, class T>
__device__ __forceinline__ T times(T x, T y) {
  return kWild ? bounded(x * y) : x * y;
}

// beta is multiplied into whatever weighs a token that is written.
struct alignas(16) Decay {
  float from_start[kChunk];                 // gates 0 to t
  float to_end[kChunk];                     // gates t + 1 to 31, and beta of t
  float in_block[kBlock];                   // second block: gates from its start to t
  float to_block_end[kBlock];               // first block: gates t + 1 to its end, and beta of t
  float diagonal[2][kBlock][kDiagonalRow];  // [block][i][j]: gates j + 1 to i, and beta of j
  float whole, whole_rest;                  // all gates, as a sum
  int wild;                                 // whether products of gates may pass 2^60
  int padding;

  // By one warp; lane l brings token l. Past the last token: gate 1, beta 0. A write multiplies
  // what the state has of its key, if that is of unit length, with `growth` at most.
  __device__ __forceinline__ void fill(int lane, double gate, float beta, float growth = 1) {
    gate = nan_if_infinite(gate);
    beta = nan_if_infinite(beta);
    bool grows = false;
    if (__any_sync(0xffffffffu, fabs(gate) > 1 || growth > 1)) {
      double peak = fabs(gate) > 1 ? fabs(gate) : 1.0;  // a gate of NaN counts as 1
      if (growth > 1) peak *= growth;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) peak *= __shfl_xor_sync(0xffffffffu, peak, step);
      grows = peak > kWildProduct;
    }
    if (lane == 0) wild = grows;
    if (grows)
      fill_all<true>(lane, gate, beta);
    else
      fill_all<false>(lane, gate, beta);
  }

 private:
  template <bool kWild>
  __device__ __forceinline__ void fill_all(int lane, double gate, float beta) {
    const int in = lane % kBlock;
    const bool early = lane < kBlock;  // in the first block
    fill_diagonal<kWild>(afresh(static_cast<unsigned>(lane)), float(gate), beta);
    double head = gate, tail = gate;  // of the gates of the block up to, and from, this lane's
#pragma unroll
    for (int step = 1; step < kBlock; step *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, head, step);
      const double after = __shfl_down_sync(0xffffffffu, tail, step);
      if (in >= step) head = times<kWild>(before, head);
      if (in + step < kBlock) tail = times<kWild>(tail, after);
    }
    const double after = __shfl_down_sync(0xffffffffu, tail, 1);
    const double first = __shfl_sync(0xffffffffu, head, kBlock - 1);
    const double second = __shfl_sync(0xffffffffu, head, kChunk - 1);
    const double end = in == kBlock - 1 ? double(beta) : times<kWild>(after, double(beta));
    const double from = times<kWild>(first, head), to = times<kWild>(end, second);
    const double all = times<kWild>(first, second);
    from_start[lane] = float(early ? head : from);
    to_end[lane] = float(early ? to : end);
    (early ? to_block_end : in_block)[in] = float(early ? end : head);
    if (lane == 0) {
      whole = float(all);
      whole_rest = float(all - whole);
    }
  }

  // A column by each lane, from beta down. The lanes of a block show their gates to each other in
  // what is spare of its first four rows.
  template <bool kWild>
  __device__ __forceinline__ void fill_diagonal(unsigned lane, float gate, float beta) {
    static_assert(kDiagonalRow - kBlock == 4, "four numbers are spare in each row");
    const unsigned in = lane % kBlock;
    float (&rows)[kBlock][kDiagonalRow] = diagonal[lane / kBlock];
    rows[in / 4][kBlock + in % 4] = gate;
    __syncwarp();
    float gates[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i += 4)
      *reinterpret_cast<Run<float, 4>*>(gates + i) =
          *reinterpret_cast<const Run<float, 4>*>(rows[i / 4] + kBlock);
    float d = beta;
#pragma unroll
    for (unsigned i = 0; i < kBlock; i++) {
      if (i > in) d = times<kWild>(d, gates[i]);
      rows[i][in] = d;  // of no meaning above the diagonal
    }
  }
};
