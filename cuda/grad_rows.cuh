// What one warp does on the way back with a chunk in shared memory: gradients of 16 tokens as keys
// and values, and of 16 tokens as queries, in the registers of mma. With i a query, j a key, G_ij
// the product of the gates after j up to i, from_i that up to i and to_j that after j,
//
//   z_j = scale sum_i G_ij (dy_i . v_j) q_i + to_j E v_j
//   dk_j = beta_j z_j                                        dbeta_j = k_j . z_j
//   dv_j = beta_j (scale sum_i G_ij (q_i . k_j) dy_i + to_j E^T k_j)
//   dq_i = scale (sum_j G_ij beta_j (dy_i . v_j) k_j + from_i S dy_i)
//
// where S is the state before the chunk and E the gradient of the state after it. Between blocks of
// 16 tokens G_ij is from_i within i's block, times the gates of the blocks between, times to_j
// within j's block (grad_gates.cuh).
#pragma once
#include "grad_weigh.cuh"

// kParts warps share a block of 16 tokens, each has a part of the columns. With two roles other
// warps make the gradients of queries than those of keys and values. kApart: S and E lie side by
// side in shared memory, not one after the other.
template <class In, int K, int V, int kParts_, int kRoles_, bool kApart_>
struct GradShape {
  using F = typename Factors<In>::Type;
  using Number = typename F::Number;
  using Scalars = GradScalars<kParts_, kRoles_>;
  static constexpr int kParts = kParts_, kRoles = kRoles_, kPadding = 16 * kParts;
  static constexpr bool kApart = kApart_;
  static constexpr int kRealKeys = K, kRealValues = V;
  static constexpr int kKeys = (K + kPadding - 1) / kPadding * kPadding;
  static constexpr int kValues = (V + kPadding - 1) / kPadding * kPadding;
  static constexpr int kKeyRow = F::template kRow<kKeys>, kValueRow = F::template kRow<kValues>;
  static constexpr int kKeyTiles = kKeys / 8 / kParts, kValueTiles = kValues / 8 / kParts;
  static constexpr int kKeySize = kChunk * kKeyRow, kValueSize = kChunk * kValueRow;
  static constexpr int kStateSize = kKeys * kValueRow;
  static constexpr int kNumbers = 2 * (kKeySize + kValueSize) + (kApart ? 2 : 1) * kStateSize;
  static constexpr int kThreads = 32 * kRoles * kParts * kBlocks;
};

template <class S>
struct GradShared {
  typename S::Number* rows;

  __device__ __forceinline__ typename S::Number* q() const { return rows; }
  __device__ __forceinline__ typename S::Number* k() const { return rows + S::kKeySize; }
  __device__ __forceinline__ typename S::Number* v() const { return k() + S::kKeySize; }
  __device__ __forceinline__ typename S::Number* dy() const { return v() + S::kValueSize; }
  __device__ __forceinline__ typename S::Number* state() const { return dy() + S::kValueSize; }
  __device__ __forceinline__ typename S::Number* dstate() const {
    return state() + (S::kApart ? S::kStateSize : 0);
  }
  __device__ __forceinline__ typename S::Scalars& scalars() const {
    return *reinterpret_cast<typename S::Scalars*>(rows + S::kNumbers);
  }
};

// Products of the keys from row0 on with the queries of block r, x += q_i . k_j, y += dy_i . v_j:
// side by side, since each step of a sum waits for the one before.
template <class S>
__device__ __forceinline__ void add_scores(float (&x)[2][4], float (&y)[2][4],
                                           const GradShared<S>& shared, int row0, int r, int lane) {
  using F = typename S::F;
  constexpr int kLongest = S::kKeys > S::kValues ? S::kKeys : S::kValues;
#pragma unroll 4
  for (int step = 0; step < kLongest / 16; step++) {
    typename F::Left key, value;
    typename F::Right query[2], gradient[2];
    const bool of_keys = step < S::kKeys / 16, of_values = step < S::kValues / 16;
    if (of_keys) {
      F::template rows<S::kKeyRow>(key, shared.k(), row0, step * 16, lane);
      F::template rows<S::kKeyRow>(query, shared.q(), r * kBlock, step * 16, lane);
    }
    if (of_values) {
      F::template rows<S::kValueRow>(value, shared.v(), row0, step * 16, lane);
      F::template rows<S::kValueRow>(gradient, shared.dy(), r * kBlock, step * 16, lane);
    }
    if (of_keys) F::multiply(x[0], x[1], key, query);
    if (of_values) F::multiply(y[0], y[1], value, gradient);
  }
}

// dv and dk of the keys += weighed products with the queries of block r.
template <class S>
__device__ __forceinline__ void add_queries(float (&dk)[S::kKeyTiles][4],
                                            float (&dv)[S::kValueTiles][4],
                                            const GradShared<S>& shared, const float (&x)[2][4],
                                            const float (&y)[2][4], int part, int r, int lane) {
  using F = typename S::F;
  typename F::Left left;
  F::tiles(left, x);
  add_columns<F, S::kValueRow>(dv, left, shared.dy(), part * S::kValueTiles * 8, r * kBlock, lane);
  F::tiles(left, y);
  add_columns<F, S::kKeyRow>(dk, left, shared.q(), part * S::kKeyTiles * 8, r * kBlock, lane);
}

// Gradients of keys and values of block w.
template <class S>
__device__ __forceinline__ void make_keys(const GradShared<S>& shared, float scale, int w, int part,
                                          int lane, float (&dk)[S::kKeyTiles][4],
                                          float (&dv)[S::kValueTiles][4]) {
  using F = typename S::F;
  typename S::Scalars& s = shared.scalars();
  const int row0 = w * kBlock, low = row0 + lane / 4, high = low + 8;
  const int key0 = part * S::kKeyTiles * 8, value0 = part * S::kValueTiles * 8;
#pragma unroll 4
  for (int step = 0; step < S::kKeys / 16; step++) {
    typename F::Left left;
    F::template rows<S::kKeyRow>(left, shared.k(), row0, step * 16, lane);
    add_columns<F, S::kValueRow>(dv, left, shared.dstate(), value0, step * 16, lane);
  }
  add_rows<F, S::kValueRow, S::kValueRow, S::kValues / 16>(dk, shared.v(), row0, shared.dstate(),
                                                           key0, lane);
  const float2 term = dot_rows<F, S::kKeyRow>(dk, shared.k(), row0, key0, lane);
  const float share_low = s.share[low], share_high = s.share[high];
  const bool counts = lane % 4 == 0;  // of the four lanes of a row
  const float owed = counts ? share_low * term.x + share_high * term.y : 0.f;
  const float sum = sum_of_warp(owed);
  if (lane == 0) s.pair[part][w + 1][kBlocks] = bounded(sum);
  const float after = s.between(w, kBlocks);
  if (counts) s.after[part][low] = after * term.x, s.after[part][high] = after * term.y;
  scale_rows(dk, after, after);
  scale_rows(dv, after, after);
  float2 later = {0, 0};
  float gap = scale;  // times the gates between the blocks
  float of_keys[2][4] = {}, of_values[2][4] = {};
  add_scores<S>(of_keys, of_values, shared, row0, w + 1 < kBlocks ? w + 1 : w, lane);
#pragma unroll 1
  for (int r = w + 1; r < kBlocks; r++) {  // later blocks; meanwhile the next one, at last the own
    float next_keys[2][4] = {}, next_values[2][4] = {};
    add_scores<S>(next_keys, next_values, shared, row0, r + 1 < kBlocks ? r + 1 : w, lane);
    const float2 sums = weigh_later(of_keys, of_values, s.from + r * kBlock, gap, lane);
    add_queries<S>(dk, dv, shared, of_keys, of_values, part, r, lane);
    later.x += gap * sums.x, later.y += gap * sums.y;
    gap = bounded(gap * s.whole[r]);
    const float shares = sum_of_warp(share_low * sums.x + share_high * sums.y);
    if (lane == 0) s.pair[part][w + 1][r] = part == 0 ? bounded(shares) : 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      of_keys[i / 4][i % 4] = next_keys[i / 4][i % 4];
      of_values[i / 4][i % 4] = next_values[i / 4][i % 4];
    }
  }
  float a[2][4];
  const float2 own =
      weigh_own(of_keys, of_values, a, s.gates[w], scale, s.beta[low], s.beta[high], lane);
  scale_rows(dk, share_low, share_high);
  scale_rows(dv, share_low, share_high);
  add_queries<S>(dk, dv, shared, of_keys, of_values, part, w, lane);
  if (part == 0) add_gates<F>(s, a, w, lane);
  const float tiles = part == 0 ? 1.f : 0.f;  // which both parts have made
  const float later_low = tiles * sum_of_row(later.x), later_high = tiles * sum_of_row(later.y);
  const float own_low = tiles * sum_of_row(own.x), own_high = tiles * sum_of_row(own.y);
  if (counts) {
    const float all_low = s.after[part][low] + later_low;
    const float all_high = s.after[part][high] + later_high;
    s.after[part][low] = bounded(s.beta[low] * all_low);
    s.after[part][high] = bounded(s.beta[high] * all_high);
    s.dbeta[part][low] = s.to[low] * all_low + own_low;
    s.dbeta[part][high] = s.to[high] * all_high + own_high;
  }
}

// Gradients of queries of block w.
template <class S>
__device__ __forceinline__ void make_queries(const GradShared<S>& shared, float scale, int w,
                                             int part, int lane, float (&dq)[S::kKeyTiles][4]) {
  using F = typename S::F;
  typename S::Scalars& s = shared.scalars();
  const int row0 = w * kBlock, low = row0 + lane / 4, high = low + 8;
  const int key0 = part * S::kKeyTiles * 8;
  add_rows<F, S::kValueRow, S::kValueRow, S::kValues / 16>(dq, shared.dy(), row0, shared.state(),
                                                           key0, lane);
  const float from_low = s.from[low], from_high = s.from[high];
  const float2 term = dot_rows<F, S::kKeyRow>(dq, shared.q(), row0, key0, lane);
  const float owed = lane % 4 ? 0.f : from_low * term.x + from_high * term.y;
  const float sum = sum_of_warp(owed);
  if (lane == 0) s.pair[part][0][w] = bounded(sum);
  const float before = bounded(scale * s.between(-1, w));
  scale_rows(dq, before, before);
  float gap = scale;
  typename F::Left left;
  float scores[2][4] = {}, two[2][2];
  const auto add_scores_of = [&](float (&to)[2][4], int c) {
    add_rows<F, S::kValueRow, S::kValueRow, S::kValues / 16>(to, shared.dy(), row0, shared.v(),
                                                             c * kBlock, lane);
  };
  add_scores_of(scores, w > 0 ? w - 1 : w);
#pragma unroll 1
  for (int c = w - 1; c >= 0; c--) {  // earlier blocks; meanwhile the next one, at last the own
    float next[2][4] = {};
    add_scores_of(next, c > 0 ? c - 1 : w);
    pairs(two, s.share + c * kBlock, lane);
#pragma unroll
    for (int i = 0; i < 8; i++)
      scores[i / 4][i % 4] = weighed(bounded(gap * two[i / 4][i % 2]), scores[i / 4][i % 4]);
    gap = bounded(gap * s.whole[c]);
    F::tiles(left, scores);
    add_columns<F, S::kKeyRow>(dq, left, shared.k(), key0, c * kBlock, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) scores[i / 4][i % 4] = next[i / 4][i % 4];
  }
  pairs(two, s.beta + w * kBlock, lane);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int i = lane / 4 + e / 2 * 8, j = n * 8 + lane % 4 * 2 + e % 2;
      const float weight = bounded(s.gates[w][i * kGateRow + j] * (scale * two[n][e % 2]));
      scores[n][e] = i >= j ? weighed(weight, scores[n][e]) : 0.f;
    }
  const float2 sums = dot_rows<F, S::kKeyRow>(dq, shared.q(), row0, key0, lane);
  if (lane % 4 == 0) s.before[part][low] = sums.x, s.before[part][high] = sums.y;
  scale_rows(dq, from_low, from_high);
  F::tiles(left, scores);
  add_columns<F, S::kKeyRow>(dq, left, shared.k(), key0, w * kBlock, lane);
}

// Of the inner product of S and E, one thread's share; state: S in global memory.
template <class S, class State>
__device__ __forceinline__ float share_of_inner(const GradShared<S>& shared, const State* state) {
  using F = typename S::F;
  float sum = 0;
  if constexpr (S::kApart && F::kCount == 1) {
    constexpr int kAcross = S::kValues / 8;  // vectors of a row
#pragma unroll 2
    for (int e = threadIdx.x; e < S::kKeys * kAcross; e += S::kThreads) {
      const int at = e / kAcross * S::kValueRow + e % kAcross * 8;
      const auto x = *reinterpret_cast<const Run<unsigned, 4>*>(shared.state() + at);
      const auto y = *reinterpret_cast<const Run<unsigned, 4>*>(shared.dstate() + at);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float x0, x1, y0, y1;
        unpack_bfloat16(x.x[i], x0, x1);
        unpack_bfloat16(y.x[i], y0, y1);
        sum += x0 * y0 + x1 * y1;
      }
    }
  } else {
#pragma unroll 8
    for (int e = threadIdx.x; e < S::kRealKeys * S::kRealValues; e += S::kThreads) {
      const int row = e / S::kRealValues, col = e % S::kRealValues;
      sum += widen<float>(state[e]) * F::template number<S::kValueRow>(shared.dstate(), row, col);
    }
  }
  return sum;
}
