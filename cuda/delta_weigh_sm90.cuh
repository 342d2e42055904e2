// How a preparer of delta_sm90.cu weighs tokens and the products of their keys and queries.
#pragma once
#include "delta_prepare_sm90.cuh"

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::find_units() const {
  const unsigned row = r * kBlock + lane / 2;
  const float q = unit_factor(queries(), row, lane % 2), k = unit_factor(keys(), row, lane % 2);
  if (lane % 2 == 0) decays().query[row] = q, decays().row[row] = k;
  meet();
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ float Preparer<S, kStages, kNormalise, kDealing>::unit_factor(
    const unsigned short* tiles, unsigned row, unsigned odd) {
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < S::kKeyTiles; i++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const unsigned short* const at = tiles + i * kTile + swizzled(row, 2 * n + odd);
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      const unsigned two[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float low = bfloat16_bits_to_float(two[j] & 0xffff);
        const float high = bfloat16_bits_to_float(two[j] >> 16);
        sum += low * low + high * high;
      }
    }
  return rsqrtf(sum + __shfl_xor_sync(0xffffffffu, sum, 1) + 1e-6f);
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::weigh_tokens(
    unsigned chunk) const {
  TokenDecays& d = decays();
  const auto get = [&](const float* from) {
    return *reinterpret_cast<const float2*>(from + 2 * lane);
  };
  const auto put = [&](float* to, float x, float y) {
    *reinterpret_cast<float2*>(to + 2 * lane) = {x, y};
  };
  const float2 gate = get(d.gate), beta = get(d.beta);
  const float scale = static_cast<float>(a.scale);
  float2 query = {scale, scale}, key = {1, 1};
  if (kNormalise) {
    const float2 units = get(d.query);
    query = {scale * units.x, scale * units.y}, key = get(d.row);
  }
  float peak = fmaxf(1.f, fabsf(gate.x)) * fmaxf(1.f, fabsf(gate.y));  // NaN counts as 1
  if (__any_sync(0xffffffffu, peak > 1.f))
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) peak *= __shfl_xor_sync(0xffffffffu, peak, step);
  const bool wild = peak > kWildProduct;
  float in0 = gate.x, in1 = gate.y, end0 = key.x, end1 = key.y;
  put(d.in[0], in0, in1);
  put(d.to_end[0], end0, end1);
  put(d.row, beta.x * key.x, beta.y * key.y);
  put(d.query, query.x, query.y);
  float all = bound(in0 * in1, wild);
  in1 = all, end0 = bound(gate.y * end0, wild);
#pragma unroll 1
  for (int level = 1; level < kLevels; level++) {
    put(d.in[level], in0, in1);
    put(d.to_end[level], end0, end1);
    const int step = 1 << (level - 1);
    const float other = __shfl_xor_sync(0xffffffffu, all, step);
    const bool later = lane & step;
    const float before = later ? other : 1.f, after = later ? 1.f : other;
    in0 *= before, in1 *= before, end0 *= after, end1 *= after, all *= other;
    if (__builtin_expect(wild, 0)) {
      in0 = bounded(in0), in1 = bounded(in1), all = bounded(all);
      end0 = bounded(end0), end1 = bounded(end1);
    }
  }
  TokenWeights& w = weights(chunk);
  put(w.beta, beta.x, beta.y);
  put(w.from, bound(in0 * key.x, wild), bound(in1 * key.y, wild));
  put(w.out, bound(in0 * query.x, wild), bound(in1 * query.y, wild));
  put(w.to_end, end0, end1);
  if (lane == 0) w.whole = all, w.wild = wild;
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
template <bool kErrors>
__device__ __forceinline__ float Preparer<S, kStages, kNormalise, kDealing>::weigh_row(
    const float (&all)[32]) const {
  const TokenDecays& d = decays();
  float near[2], far[2], x[2][4], squares = 0;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned t = r * kBlock + lane / 4 + 8 * n;
    const float own = kErrors ? d.row[t] : d.query[t];
    near[n] = own * d.in[4][t];
    far[n] = own * d.in[5][t];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i / 4][i % 4] = all[i];
#pragma unroll
  for (unsigned c = 1; c < kBlocks; c++)
    if (r >= c) {
      const bool apart = (r ^ (c - 1)) & 2;
      const float* const col = d.to_end[apart ? 5 : 4] + (c - 1) * kBlock + lane % 4 * 2;
      const float by[2] = {apart ? far[0] : near[0], apart ? far[1] : near[1]};
      weigh<false>(x, by, col);
      if (kErrors) squares += sum_squares(x);
      unsigned high[4];
      pack_left(high, x);
      if (kErrors)
        put_compact(compact(r, c - 1), high);
      else
        put_block(to().scores, r, c - 1, high);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i / 4][i % 4] = all[8 * c + i];
    }
  weigh_diagonal<false, kErrors>(x, r);
  if (kErrors) {
    put_diagonal(x, r);
    return squares + sum_squares(x);
  }
  unsigned high[4];
  pack_left(high, x);
  put_block(to().scores, r, r, high);
  return 0;
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
template <bool kErrors>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::make_row(
    unsigned row, bool wild, bool exact) const {
  const TokenDecays& d = decays();
  float near[2], far[2];
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const unsigned t = row * kBlock + lane / 4 + 8 * n;
    const float own = kErrors ? d.row[t] : d.query[t];
    near[n] = bound(own * d.in[4][t], wild);
    far[n] = bound(own * d.in[5][t], wild);
  }
#pragma unroll 1
  for (unsigned c = 0; c <= row; c++) {
    float x[2][4];
    multiply_block(x, (kErrors ? keys() : queries()) + row * (kBlock * 64), c);
    if (c < row) {
      const bool apart = (row ^ c) & 2;
      const float* const col = d.to_end[apart ? 5 : 4] + c * kBlock + lane % 4 * 2;
      const float by[2] = {apart ? far[0] : near[0], apart ? far[1] : near[1]};
      if (wild)
        weigh<true>(x, by, col);
      else
        weigh<false>(x, by, col);
    } else if (wild) {
      weigh_diagonal<true, kErrors>(x, row);
    } else {
      weigh_diagonal<false, kErrors>(x, row);
    }
    if (kErrors && exact) {
      float* const block = exact_block(to(), rests(), row, c) + lane % 4 * 32 + lane / 4;
#pragma unroll
      for (int i = 0; i < 8; i++)
        block[(i / 4 * 8 + i % 2) * kBlock + i / 2 % 2 * 8] = x[i / 4][i % 4];
      continue;
    }
    if (kErrors && c == row) {
      put_diagonal(x, row);
      continue;
    }
    Split both;
    both.set(x);
    if (kErrors) {
      put_compact(compact(row, c), both.high);
      put_low(c, both.low);
    } else {
      put_block(to().scores, row, c, both.high);
      rests().scores[lower(row, c)][lane] = left_as_right_transposed(both.low);
    }
  }
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::multiply_block(
    float (&x)[2][4], const unsigned short* rows, unsigned c) const {
  const unsigned short* columns = keys() + c * (kBlock * 64);
  const unsigned left = swizzled(lane % 16, lane / 16);
  const unsigned right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  float odd[2][4] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i / 4][i % 4] = 0;
#pragma unroll 1
  for (int i = 0; i < S::kKeyTiles; i++, rows += kTile, columns += kTile) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      unsigned a[4], b[4];
      ldmatrix_x4(a, rows + (left ^ n * 16));
      ldmatrix_x4(b, columns + (right ^ n * 16));
      multiply(n % 2 ? odd : x, a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) x[i / 4][i % 4] += odd[i / 4][i % 4];
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
template <bool kWild>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::weigh(
    float (&x)[2][4], const float (&by)[2], const float* col) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float2 end = *reinterpret_cast<const float2*>(col + half * 8);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float* const two = x[half] + 2 * n;
      two[0] = times<kWild>(times<kWild>(by[n], end.x), two[0]);
      two[1] = times<kWild>(times<kWild>(by[n], end.y), two[1]);
    }
  }
}

template <class S, int kStages, bool kNormalise, Dealing kDealing>
template <bool kWild, bool kErrors>
__device__ __forceinline__ void Preparer<S, kStages, kNormalise, kDealing>::weigh_diagonal(
    float (&x)[2][4], unsigned row) const {
  const TokenDecays& d = decays();
  const unsigned i = lane / 4, t = row * kBlock;
  const float* const own = (kErrors ? d.row : d.query) + t + i;
  const float by[2] = {own[0], own[8]};
  const float across = times<kWild>(by[1], d.in[3][t + i + 8]);
  const float2 end = *reinterpret_cast<const float2*>(d.to_end[3] + t + lane % 4 * 2);
  x[0][2] = times<kWild>(times<kWild>(across, end.x), x[0][2]);
  x[0][3] = times<kWild>(times<kWild>(across, end.y), x[0][3]);
  x[1][0] = x[1][1] = 0;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const unsigned j = lane % 4 * 2 + e, differ = i ^ j,
                   level = differ < 2 ? 0 : (differ < 4 ? 1 : 2);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float& p = x[n][2 * n + e];
      const float in = j < i ? times<kWild>(by[n], d.in[level][t + 8 * n + i]) : by[n];
      const float w = times<kWild>(in, d.to_end[level][t + 8 * n + j]);
      if (kPieces && kErrors && i == j && !(fabsf(1 - w * p) <= kGrowing))
        shared.grows[static_cast<int>(at) >= warm()] = 1;
      p = j < i + !kErrors ? times<kWild>(w, p) : 0.f;
    }
  }
}
