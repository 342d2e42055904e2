// The delta rule's state in the registers of a warpgroup of sm_90a: 64 of its columns, transposed,
// and what a chunk does with them. All products have their left factor in registers, so nothing of
// a chunk goes from warp to warp.
#pragma once
#include "delta_feed_sm90.cuh"

// Sums of 16 tokens of 64 columns, transposed, as left factors.
__device__ __forceinline__ void pack_tokens(unsigned (&a)[4], const float* x) {
  a[0] = pack_bfloat16(x[0], x[1]);
  a[1] = pack_bfloat16(x[2], x[3]);
  a[2] = pack_bfloat16(x[4], x[5]);
  a[3] = pack_bfloat16(x[6], x[7]);
}
// What packing them has rounded off.
__device__ __forceinline__ unsigned rest_of(float x, float y) {
  const unsigned two = pack_bfloat16(x, y);
  return pack_bfloat16(x - bfloat16_bits_to_float(two & 0xffff),
                       y - bfloat16_bits_to_float(two >> 16));
}
__device__ __forceinline__ void pack_rest(unsigned (&a)[4], const float* x) {
  a[0] = rest_of(x[0], x[1]);
  a[1] = rest_of(x[2], x[3]);
  a[2] = rest_of(x[4], x[5]);
  a[3] = rest_of(x[6], x[7]);
}

// Number i of a thread is at row 16 warp + lane / 4 + i / 2 % 2 * 8 of what is transposed, and at
// its column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <int K>
struct StateColumns64 {
  float s[K / 2];

  // Through afresh: registers are too few to keep what is made of it.
  static __device__ __forceinline__ unsigned thread() { return afresh(threadIdx.x) % kGroup; }
  // Where in a tile this lane finds its columns of v, transposed, and leaves y.
  static __device__ __forceinline__ unsigned own(unsigned t) {
    const unsigned lane = t % 32;
    return swizzled(lane / 16 * 8 + lane % 8, t / 32 * 2 + lane / 8 % 2);
  }

  // f(number, where it is, whether that is one of so many rows and columns of an array with such
  // strides that begins at `start`).
  template <class T, class F>
  __device__ __forceinline__ void each(T* start, int rows, int cols, long long down,
                                       long long across, F f) {
    const unsigned t = thread();
    const int row = t % 4 * 2, col = t / 32 * 16 + t % 32 / 4;
    start += row * down + col * across;
    const int left = col < cols ? rows - row : 0, right = col + 8 < cols ? rows - row : 0;
#pragma unroll
    for (int i = 0; i < K / 8; i++, start += 8 * down)
#pragma unroll
      for (int n = 0; n < 4; n++)
        f(s[4 * i + n], start + n % 2 * down + n / 2 * (8 * across),
          8 * i + n % 2 < (n < 2 ? left : right));
  }

  // The state as left factors.
  __device__ __forceinline__ void round(unsigned (&rounded)[K / 16][4]) const {
#pragma unroll
    for (int i = 0; i < K / 16; i++) pack_tokens(rounded[i], s + 8 * i);
  }
  // u = (rows S)^T, begun and not waited for.
  static __device__ __forceinline__ void read(float (&u)[32], const unsigned (&rounded)[K / 16][4],
                                              const unsigned short* rows) {
    wgmma_begin();
    multiply_rows(u, rounded, rows);
    wgmma_commit();
  }
  // The same, waited for, in fewer registers: adding `nothing`, 0, keeps the compiler from holding
  // what it has rounded before.
  __device__ __forceinline__ void read_slowly(float (&u)[32], const unsigned short* rows,
                                              float nothing) {
#pragma unroll
    for (int two = 0; two < K / 32; two++) {
      unsigned rounded[2][4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float own[8];
#pragma unroll
        for (int e = 0; e < 8; e++) own[e] = s[16 * two + 8 * i + e] + nothing;
        pack_tokens(rounded[i], own);
      }
      const unsigned long long right = factor(rows + two / 2 * kTile + two % 2 * 32);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (two + i == 0)
          wgmma_first(u, rounded[0], right);
        else
          wgmma<false>(u, rounded[i], later(right, i * 16));
      wgmma_commit();
      wgmma_wait<0>();
      settle(u);
    }
  }
  __device__ __forceinline__ void decay(float whole) {
#pragma unroll
    for (int i = 0; i < K / 2; i++) s[i] *= whole;
  }
  // From u and v, diag(beta) (V - diag(d) K S), transposed and rounded.
  __device__ __forceinline__ void find_errors(unsigned (&x)[kBlocks][4], float (&u)[32],
                                              const unsigned short* v,
                                              const TokenWeights& weights) const {
    v += own(thread());
    const float *const from_start = pairs(weights.from), *const betas = pairs(weights.beta);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) {
      unsigned vt[4];
      ldmatrix_x4<true>(vt, v + j * kBlock * 64);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 from = pair(from_start, 2 * j + half);
        const float2 beta = pair(betas, 2 * j + half);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float* const two = u + 8 * j + 4 * half + 2 * i;
          const unsigned value = vt[2 * half + i];
          two[0] = beta.x * (bfloat16_bits_to_float(value & 0xffff) - from.x * two[0]);
          two[1] = beta.y * (bfloat16_bits_to_float(value >> 16) - from.y * two[1]);
        }
      }
      pack_tokens(x[j], u + 8 * j);
    }
  }
  static __device__ __forceinline__ void pack(unsigned (&x)[kBlocks][4], const float (&w)[32]) {
#pragma unroll
    for (int j = 0; j < kBlocks; j++) pack_tokens(x[j], w + 8 * j);
  }
  static __device__ __forceinline__ void pack_rests(unsigned (&rest)[kBlocks][4],
                                                    const float (&w)[32]) {
#pragma unroll
    for (int j = 0; j < kBlocks; j++) pack_rest(rest[j], w + 8 * j);
  }
  static __device__ __forceinline__ void unpack(float (&w)[32], const unsigned (&x)[kBlocks][4],
                                                const unsigned (&rest)[kBlocks][4]) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const unsigned high = x[i / 4][i % 4], low = rest[i / 4][i % 4];
      w[2 * i] = bfloat16_bits_to_float(high & 0xffff) + bfloat16_bits_to_float(low & 0xffff);
      w[2 * i + 1] = bfloat16_bits_to_float(high >> 16) + bfloat16_bits_to_float(low >> 16);
    }
  }

  // Times what a token is weighed with.
  __device__ __forceinline__ void weigh(float (&x)[32], const float* by) const {
    by = pairs(by);
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const float2 w = pair(by, n);
      x[4 * n] *= w.x, x[4 * n + 1] *= w.y, x[4 * n + 2] *= w.x, x[4 * n + 3] *= w.y;
    }
  }
  static __device__ __forceinline__ const float* pairs(const float* weights) {
    return weights + thread() % 4 * 2;
  }
  static __device__ __forceinline__ float2 pair(const float* own, int eight) {
    return *reinterpret_cast<const float2*>(own + eight * 8);
  }

  // Outputs into a tile, tokens down again.
  __device__ __forceinline__ void put_outputs(unsigned short* to, const float (&o)[32]) const {
    to += own(__shfl_sync(0xffffffffu, threadIdx.x % kGroup, threadIdx.x % 32));
#pragma unroll
    for (int j = 0; j < kBlocks; j++) {
      unsigned two[4];
      pack_tokens(two, o + 8 * j);
      stmatrix_x4<true>(to + j * kBlock * 64, two[0], two[1], two[2], two[3]);
    }
  }

  // c = left^T rows^T for the 64 rows of K numbers.
  static __device__ __forceinline__ void multiply_rows(float (&c)[32],
                                                       const unsigned (&left)[K / 16][4],
                                                       const unsigned short* rows) {
    const unsigned long long right = factor(rows);
    wgmma_first(c, left[0], right);
#pragma unroll
    for (int i = 1; i < K / 16; i++)
      wgmma<false>(c, left[i], later(right, i / 4 * kTile + i % 4 * 16));
  }
  // d (+)= left^T table^T
  template <bool kFirst>
  static __device__ __forceinline__ void multiply_table(float (&d)[32],
                                                        const unsigned (&left)[kBlocks][4],
                                                        const unsigned short* table) {
    const unsigned long long right = factor(table);
#pragma unroll
    for (int j = 0; j < kBlocks; j++)
      if (kFirst && j == 0)
        wgmma_first(d, left[0], right);
      else
        wgmma<false>(d, left[j], later(right, j * 16));
  }
  // d += left^T rests^T, at once
  static __device__ __forceinline__ void multiply_rests(float (&d)[32],
                                                        const unsigned (&left)[kBlocks][4],
                                                        const uint4 (&rests)[kLowerBlocks][32]) {
    const unsigned lane = thread() % 32;
#pragma unroll
    for (int r = 0; r < kBlocks; r++) {
      float sum[2][4] = {};
#pragma unroll
      for (int c = 0; c <= r; c++) {
        const uint4 b = rests[lower(r, c)][lane];
        multiply(sum, left[c], {b.x, b.y, b.z, b.w});
      }
#pragma unroll
      for (int i = 0; i < 8; i++) d[8 * r + i] += sum[i / 4][i % 4];
    }
  }
  // S^T += left^T K
  __device__ __forceinline__ void add_keys(const unsigned (&left)[kBlocks][4],
                                           const unsigned short* k) {
    const unsigned long long right = factor(k, 2 * kTile);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) wgmma<true>(s, left[j], later(right, j * kBlock * 64));
  }
};
