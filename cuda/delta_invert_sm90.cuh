// How a preparer of delta_sm90.cu inverts I + A: by substitution in blocks on the diagonal, by
// products of blocks to their left.
#pragma once
#include "delta_prepare_sm90.cuh"

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::invert_diagonal()
    const {
  float x[kBlock];
  __syncwarp();
  substitute(x, reinterpret_cast<const float*>(scratch(r)));
  __syncwarp();
  put_inverse(x);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::put_inverse(
    const float (&x)[kBlock]) const {
  const bool lower = lane / 16;  // half of a column
  unsigned two[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned above = pack_bfloat16(x[2 * i], x[2 * i + 1]);
    const unsigned below = pack_bfloat16(x[8 + 2 * i], x[9 + 2 * i]);
    two[i] = lower ? below : above;
  }
  const unsigned place = lane / 8 % 2 * 16 + lane / 16 * 8 + lane % 8;
  *reinterpret_cast<uint4*>(scratch(r) + 8 * place) = {two[0], two[1], two[2], two[3]};
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::invert_carefully(
    bool wild) const {
  float inverse[2][4];
  Split both;
  __syncwarp();
  substitute_carefully(reinterpret_cast<float*>(scratch(r)), wild);
  get_inverse(inverse);
  both.set(inverse);
  put_compact(scratch(r), both.high);
  put_compact(scratch(r) + kBlock * kBlock, both.low);
  put_low(r, both.low);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::get_inverse(
    float (&inverse)[2][4]) const {
  const float* const own =
      reinterpret_cast<const float*>(scratch(r)) + lane / 4 * kDiagonalRow + lane % 4 * 2;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 two =
        *reinterpret_cast<const float2*>(own + i % 2 * (8 * kDiagonalRow) + i / 2 * 8);
    inverse[i / 2][i % 2 * 2] = two.x, inverse[i / 2][i % 2 * 2 + 1] = two.y;
  }
  __syncwarp();
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::substitute(
    float (&x)[kBlock], const float* block) const {
#pragma unroll
  for (int i = 0; i < kBlock; i++) x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < kBlock - 1; i++)
#pragma unroll
    for (int j = (i + 1) / 4 * 4; j < kBlock; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(block + i * kDiagonalRow + j);
      if (j > i) x[j] -= a.x * x[i];
      if (j + 1 > i) x[j + 1] -= a.y * x[i];
      if (j + 2 > i) x[j + 2] -= a.z * x[i];
      x[j + 3] -= a.w * x[i];
    }
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::substitute_carefully(
    float* block, bool wild) const {
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; i++) x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll 1
  for (int i = 0; i < kBlock; i++) {
    const float own = x[0];
#pragma unroll
    for (int n = 1; n < kBlock; n++) {
      const float a = i + n < kBlock ? block[i * kDiagonalRow + i + n] : 0.f;
      x[n - 1] = wild ? tame(x[n] - tame(a * own)) : x[n] - a * own;
    }
    __syncwarp();
    if (lane < kBlock) block[i * kDiagonalRow + lane] = own;
  }
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::complete() const {
  unsigned t0[4], t1[4] = {}, t2[4] = {}, t3[4] = {};
  ldmatrix_x4<true>(t0, scratch(r) + 8 * lane);
  if (r >= 1) {
    float sum[2][4] = {};
    add(sum, t0, 0, r - 1);
    finish(t1, sum, 1);
  }
  if (r >= 2) {
    float sum[2][4] = {};
    add(sum, t0, 0, r - 2);
    add(sum, t1, 1, r - 2);
    finish(t2, sum, 2);
  }
  if (r >= 3) {
    float sum[2][4] = {};
    add(sum, t0, 0, r - 3);
    add(sum, t1, 1, r - 3);
    add(sum, t2, 2, r - 3);
    finish(t3, sum, 3);
  }
  meet();
  put_inverse(t0, t1, t2, t3);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::put_inverse(
    const unsigned (&t0)[4], const unsigned (&t1)[4], const unsigned (&t2)[4],
    const unsigned (&t3)[4]) const {
  const unsigned zeros[4] = {};
#pragma unroll
  for (int c = 1; c < kBlocks; c++)
    if (c > r) put_block(to().inverse, r, c, zeros);
  put_block(to().inverse, r, r, t0);
  if (r >= 1) put_block(to().inverse, r, r - 1, t1);
  if (r >= 2) put_block(to().inverse, r, r - 2, t2);
  if (r >= 3) put_block(to().inverse, r, r - 3, t3);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::add(
    float (&sum)[2][4], const unsigned (&x)[4], unsigned e, unsigned c) const {
  unsigned right[4];
  get(right, r - e, c);
  multiply(sum, x, right);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::finish(
    unsigned (&t)[4], const float (&sum)[2][4], int d) const {
  unsigned left[4], right[4];
  float product[2][4] = {};
  pack_left(left, sum);
  ldmatrix_x4(right, scratch(r - d) + 8 * lane);
  multiply(product, left, right);
  pack_left(t, product);
  t[0] ^= 0x80008000u, t[1] ^= 0x80008000u, t[2] ^= 0x80008000u, t[3] ^= 0x80008000u;
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::complete_carefully(
    bool wild) const {
  Split t[kBlocks] = {};  // from the diagonal to the left
  get_compact(t[0].high, scratch(r));
  get_compact(t[0].low, scratch(r) + kBlock * kBlock);
#pragma unroll
  for (int d = 1; d < kBlocks; d++)
    if (d <= r) {
      float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
      for (int e = 0; e < d; e++) add(sum, t[e], e, r - d, wild);
      t[d].set(sum);
      add(product, t[d], d, r - d, wild);
#pragma unroll
      for (int i = 0; i < 8; i++) product[i / 4][i % 4] = -product[i / 4][i % 4];
      t[d].set(product);
    }
  meet();
#pragma unroll
  for (int d = 0; d < kBlocks; d++)
    if (d <= r) rests().inverse[lower(r, r - d)][lane] = left_as_right_transposed(t[d].low);
  put_inverse(t[0].high, t[1].high, t[2].high, t[3].high);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::add(
    float (&sum)[2][4], const Split& x, unsigned e, unsigned c, bool wild) const {
  unsigned right[4];
  const uint4 low = rests().inverse[lower(r - e, c)][lane];
  multiply(sum, x.high, {low.x, low.y, low.z, low.w});
  get(right, r - e, c);
  multiply(sum, x.low, right);
  multiply(sum, x.high, right);
  if (wild)
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = tame(sum[i / 4][i % 4]);
}
