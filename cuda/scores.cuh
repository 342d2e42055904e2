// Decays put on what tensor cores multiply, in the registers of mma and wgmma.
#pragma once
#include "decay.cuh"

// Two bfloat16 numbers in one register, each times its weight.
template <bool kWild>
__device__ __forceinline__ unsigned weigh(unsigned x, float w0, float w1) {
  return pack_bfloat16(times<kWild>(given<kWild>(bfloat16_bits_to_float(x & 0xffff)), w0),
                       times<kWild>(given<kWild>(bfloat16_bits_to_float(x >> 16)), w1));
}

// Columns of a chunk's keys, transposed, times the decay from each token to the end and, with
// kLater, times that of all that follows. A product that overflows is infinite.
template <bool kLater>
__device__ __forceinline__ void weigh_keys(unsigned (&kt)[kBlocks][4], const Decay& decay,
                                           float later, int lane) {
#pragma unroll
  for (int j = 0; j < kBlocks; j++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float2 w =
          *reinterpret_cast<const float2*>(decay.to_end + j * kBlock + half * 8 + lane % 4 * 2);
      if (kLater) w = {bounded(w.x * later), bounded(w.y * later)};
#pragma unroll
      for (int i = 0; i < 2; i++) kt[j][2 * half + i] = weigh<false>(kt[j][2 * half + i], w.x, w.y);
    }
}

// Scores of block r of rows with block c of columns, times their decays, as the left factor of the
// next product. Above the diagonal a score may be anything, NaN too: it is not multiplied away.
template <bool kWild>
__device__ __forceinline__ void weigh_block(unsigned (&p)[4], const float* scores,
                                            const Decay& decay, int r, int c, int lane) {
  const int i = lane / 4, j = lane % 4 * 2;
  if (c > r) {
    p[0] = p[1] = p[2] = p[3] = 0;
    return;
  }
  const float between = decay.between[r][c];
  const float row0 = times<kWild>(between, decay.in_block[r * kBlock + i]);
  const float row1 = times<kWild>(between, decay.in_block[r * kBlock + i + 8]);
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const int col = tile * 8 + j;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = given<kWild>(scores[tile * 4 + e]);
    if (c < r) {
      const float w0 = decay.to_block_end[c * kBlock + col];
      const float w1 = decay.to_block_end[c * kBlock + col + 1];
      p[2 * tile] = pack_bfloat16(times<kWild>(times<kWild>(x[0], row0), w0),
                                  times<kWild>(times<kWild>(x[1], row0), w1));
      p[2 * tile + 1] = pack_bfloat16(times<kWild>(times<kWild>(x[2], row1), w0),
                                      times<kWild>(times<kWild>(x[3], row1), w1));
    } else {
      const float* const d0 = decay.diagonal[r][i] + col;
      const float* const d1 = decay.diagonal[r][i + 8] + col;
      p[2 * tile] = pack_bfloat16(col <= i ? times<kWild>(x[0], d0[0]) : 0.f,
                                  col + 1 <= i ? times<kWild>(x[1], d0[1]) : 0.f);
      p[2 * tile + 1] = pack_bfloat16(col <= i + 8 ? times<kWild>(x[2], d1[0]) : 0.f,
                                      col + 1 <= i + 8 ? times<kWild>(x[3], d1[1]) : 0.f);
    }
  }
}

// weight x. It is bounded later if kWild: then NaN where x is infinite.
template <bool kWild>
__device__ __forceinline__ float times_given(float weight, float x) {
  return kWild ? weighed(weight, x) : weight * x;
}

// The same for a row of blocks, with fewer branches.
struct RowWeights {
  float row[2], between[kBlocks], diagonal[8];

  __device__ __forceinline__ RowWeights(const Decay& decay, int r, int lane, float scale) {
    const int i = lane / 4, j = lane % 4 * 2;
    row[0] = scale * decay.in_block[r * kBlock + i];
    row[1] = scale * decay.in_block[r * kBlock + i + 8];
    const float4 b = *reinterpret_cast<const float4*>(decay.between[r]);
    between[0] = b.x, between[1] = b.y, between[2] = b.z, between[3] = b.w;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float2 d =
          *reinterpret_cast<const float2*>(decay.diagonal[r][i + n % 2 * 8] + n / 2 * 8 + j);
      diagonal[2 * n] = scale * d.x, diagonal[2 * n + 1] = scale * d.y;
    }
  }

  template <bool kWild>
  __device__ __forceinline__ void weigh(unsigned (&p)[kBlocks][4], const float (&scores)[32],
                                        const Decay& decay, int r, int lane) const {
    const int i = lane / 4, j = lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kBlocks; c++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 col =
            *reinterpret_cast<const float2*>(decay.to_block_end + c * kBlock + half * 8 + j);
#pragma unroll
        for (int low = 0; low < 2; low++) {
          const int n = 2 * half + low;
          const float* const x = scores + c * 8 + n * 2;
          const float w = times<kWild>(between[c], kept<kWild>(row[low]));
          const float w0 = c == r ? kept<kWild>(diagonal[2 * n]) : times<kWild>(w, col.x);
          const float w1 = c == r ? kept<kWild>(diagonal[2 * n + 1]) : times<kWild>(w, col.y);
          const int at = i + low * 8 + (r - c) * kBlock, to = half * 8 + j;  // columns up to row
          const float low0 = to <= at ? times_given<kWild>(w0, x[0]) : 0.f;
          const float high0 = to + 1 <= at ? times_given<kWild>(w1, x[1]) : 0.f;
          p[c][n] = kWild ? pack_bounded(low0, high0) : pack_bfloat16(low0, high0);
        }
      }
  }
};
