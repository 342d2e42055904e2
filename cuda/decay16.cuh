// Decays inside chunks of 16 tokens: products of neighbouring gates and nothing else. They are made
// in double and rounded once, since equal gates make equal roundings, which would add up over the
// chunks of a long sequence. The decay of the whole chunk, which meets the state again and again,
// is kept as the sum of two floats.
#pragma once
#include "bounded.cuh"

constexpr int kChunk = 16;        // tokens, the height of a tensor-core tile
constexpr int kDiagonalRow = 20;  // floats, so that rows fall into different banks

constexpr float kWildProduct = 1.152921504606847e18f;  // 2^60

template <bool kWild, class T>
__device__ __forceinline__ T times(T x, T y) {
  return kWild ? bounded(x * y) : x * y;
}

// beta is multiplied into whatever weighs a token that is written.
struct alignas(16) Decay {
  float between[kChunk]
               [kDiagonalRow];  // [i][j]: gates j + 1 to i, and beta of j; anything for j > i
  float from_start[kChunk];     // gates 0 to t
  float to_end[kChunk];         // gates t + 1 to 15, and beta of t
  float whole, whole_rest;      // all gates, as a sum
  int wild;                     // whether products of gates may pass 2^60
  int padding;
};

// Decays of two chunks by one warp: each half of it brings a chunk's tokens, one a lane, and says
// where decays go. Past the last token: gate 1, beta 0. A write multiplies what the state has of
// its key, if that is of unit length, with `growth` at most.
__device__ __forceinline__ bool grows(double gate, float growth) {
  if (!__any_sync(0xffffffffu, fabs(gate) > 1 || growth > 1)) return false;
  double peak = fabs(gate) > 1 ? fabs(gate) : 1.0;  // a gate of NaN counts as 1
  if (growth > 1) peak *= growth;
#pragma unroll
  for (int step = 1; step < kChunk; step *= 2) peak *= __shfl_xor_sync(0xffffffffu, peak, step);
  return peak > kWildProduct;
}

template <bool kWild>
__device__ __forceinline__ void fill_decays(Decay& to, bool wild, int lane, double gate,
                                            float beta) {
  const int in = lane % kChunk;
  double head = gate, tail = gate;  // of the gates of the chunk up to, and from, this lane's
#pragma unroll
  for (int step = 1; step < kChunk; step *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, head, step);
    const double after = __shfl_down_sync(0xffffffffu, tail, step);
    if (in >= step) head = times<kWild>(before, head);
    if (in + step < kChunk) tail = times<kWild>(tail, after);
  }
  const double after = __shfl_down_sync(0xffffffffu, tail, 1);
  to.from_start[in] = float(head);
  to.to_end[in] = in == kChunk - 1 ? beta : static_cast<float>(times<kWild>(after, double(beta)));
  if (in == kChunk - 1) {
    to.whole = float(head);
    to.whole_rest = float(head - to.whole);
    to.wild = wild;
  }
}

// A column of what lies between tokens by each lane, from beta down. Lanes of a chunk show their
// gates to each other in what is spare of its first four rows.
template <bool kWild>
__device__ __forceinline__ void fill_between(Decay& to, int lane, float gate, float beta) {
  static_assert(kDiagonalRow - kChunk == 4, "four numbers are spare in each row");
  const int in = lane % kChunk;
  to.between[in / 4][kChunk + in % 4] = gate;
  __syncwarp();
  float gates[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i += 4)
    *reinterpret_cast<Run<float, 4>*>(gates + i) =
        *reinterpret_cast<const Run<float, 4>*>(to.between[i / 4] + kChunk);
  float d = beta;
#pragma unroll
  for (int i = 0; i < kChunk; i++) {
    if (i > in) d = times<kWild>(d, gates[i]);
    to.between[i][in] = d;
  }
}
