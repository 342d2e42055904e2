// What one warp does with chunks of 32 tokens in shared memory under the linear rule, on tensor
// cores: how it multiplies is in products32.cuh. In is the type of q, k, v and y.
//
// Tensor cores round sums toward zero, so no chain of them is longer than a chunk: states are added
// up outside, with the roundings carried along.
#pragma once
#include "decay32.cuh"
#include "boxes32.cuh"

constexpr int kPairs = 2;  // of tiles that are multiplied side by side

template <class In>
constexpr int kTokenBox = kChunk * kBoxCols<In>;  // numbers of a box of a chunk's rows

// The transposed state of one warp: tiles of 16 columns of V by 8 rows of K, as mma leaves them.
template <class In, int kProducts, int kStateBox, int kTilesDown, int kTilesAcross>
struct StateTiles {
  float x[kTilesDown][kTilesAcross][4];
  float carry[kTilesDown][kTilesAcross][4];  // what roundings took from x
  // Few tiles: a chunk's two blocks are summed apart, in chains half as long.
  static constexpr bool kApart = kTilesDown * kTilesAcross <= 2;

  // f(value, row of K, column of V), both counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          f(x[m][n][i], n * 8 + lane % 4 * 2 + i % 2, m * 16 + lane / 4 + i / 2 * 8);
  }

  __device__ __forceinline__ void clear_carry() {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) carry[m][n][i] = 0;
  }

  // S <- whole S + sum_j to_end_j k_j v_j^T for rows from row0 and columns from col0. `meanwhile`
  // is called with the state as it was, while products are under way.
  template <class F>
  __device__ __forceinline__ void advance(const In* k, const In* v, int row0, int col0,
                                          const Decay& decay, int lane, F meanwhile) {
    const float whole = decay.whole, rest = decay.whole_rest;
    float more[kTilesDown][kTilesAcross][4] = {};
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) carry[m][n][i] = whole * carry[m][n][i] + rest * x[m][n][i];
    if (decay.wild)
      add_chunk<true>(k, v, row0, col0, decay, lane, more);
    else
      add_chunk<false>(k, v, row0, col0, decay, lane, more);
    meanwhile();
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float before = x[m][n][i];
          const float added = kApart ? carry[m][n][i] + more[m][n][i] : carry[m][n][i];
          const float after = fmaf(whole, before, added);
          carry[m][n][i] = fmaf(whole, before, -after) + added;
          x[m][n][i] = after;
        }
  }

  // Rows of K side by side, one row of shared memory for each column of V, ready to be read as a
  // factor.
  __device__ __forceinline__ void publish(float* to, int row0, int col0, int lane) const {
    const StateWriter<In, kStateBox> rows(to, row0 / 8, col0, lane);
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int n = 0; n < kTilesAcross; n += 2) {
          const int next = n + 1 < kTilesAcross ? n + 1 : n;
          const float pairs[2][2] = {{x[m][n][2 * half], x[m][n][2 * half + 1]},
                                     {x[m][next][2 * half], x[m][next][2 * half + 1]}};
          rows.template write<kProducts>(2 * m + half, n, pairs, next > n);
        }
  }

 private:
  template <bool kWild>
  __device__ __forceinline__ void add_chunk(const In* k, const In* v, int row0, int col0,
                                            const Decay& decay, int lane,
                                            float (&more)[kTilesDown][kTilesAcross][4]) {
    const Columns<In, kTokenBox<In>> keys(k, row0 / 8, lane);
    const Columns<In, kTokenBox<In>> values(v, col0 / 8, lane);
#pragma unroll(kApart && !kWild ? 2 : 1)
    for (int block = 0; block < kChunk / kBlock; block++) {
      Four<kProducts> left[kTilesDown][2];
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        w[i] = decay.to_end[block * kBlock + lane % 4 * 2 + i % 2 + i / 2 * 8];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++) {
        float vt[2][4];
        values.read(vt, 2 * m, block);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int i = 0; i < 4; i++) vt[half][i] = times<kWild>(given<kWild>(vt[half][i]), w[i]);
          left[m][half].set_left(vt[half]);
        }
      }
      add_products<Given<In, kProducts>, kPairs, kTilesAcross>(
          left, keys, block,
          [&](int, int m, int n) -> float (&)[4] {
            return kApart && !kWild && block ? more[m][n] : carry[m][n];
          },
          [](int, int) { return true; });
    }
  }
};

// kTilesDown * 16 rows of a chunk's outputs, kTilesAcross tiles of 8 columns: all rows of the
// chunk, or those of one block.
template <class In, int kProducts, int kKeyTiles, int kStateBox, int kTilesDown, int kTilesAcross>
struct OutTiles {
  float y[kTilesDown][kTilesAcross][4];

  // state_read is called once the state is no longer wanted.
  template <class F>
  __device__ __forceinline__ void make(const In* q, const In* k, const In* v, const float* state,
                                       int col0, const Decay& decay, int block, int lane,
                                       F state_read) {
    if (kTilesDown == 2 || block == 0)
      make_from<0>(q, k, v, state, col0, decay, lane, state_read);
    else
      make_from<1>(q, k, v, state, col0, decay, lane, state_read);
  }

 private:
  template <int kFirst, class F>
  __device__ __forceinline__ void make_from(const In* q, const In* k, const In* v,
                                            const float* state, int col0, const Decay& decay,
                                            int lane, F state_read) {
    constexpr int kScoreTiles = 2 * (kFirst + kTilesDown);  // of 8 keys, at most
    const Rows<In, kTokenBox<In>> queries(q + kFirst * kBlock * kBoxCols<In>, lane), keys(k, lane);
    const StateReader<kStateBox> states{Rows<float, kStateBox>(state + col0 * 32, lane)};
    float scores[kTilesDown][kScoreTiles][4] = {};
    const auto add_to_y = [&](int, int m, int n) -> float (&)[4] { return y[m][n]; };
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) y[m][n][i] = 0;
#pragma unroll 1  // instructions are scarce
    for (int tile = 0; tile < kKeyTiles; tile++) {
      Given<In, kProducts> left[kTilesDown][2];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++) queries.load_left(left[m], 2 * m, tile);
      add_products<Given<In, kProducts>, kPairs, kScoreTiles>(
          left, keys, tile, [&](int, int m, int n) -> float (&)[4] { return scores[m][n]; },
          [](int m, int n) { return n / 2 <= kFirst + m; });
      add_products<Four<kProducts>, kPairs, kTilesAcross>(left, states, tile, add_to_y,
                                                          [](int, int) { return true; });
    }
    state_read();
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < kTilesAcross; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          y[m][n][i] *= decay.from_start[(kFirst + m) * kBlock + lane / 4 + i / 2 * 8];
    if (decay.wild)
      weigh_all<true, kFirst>(scores, decay, lane);
    else
      weigh_all<false, kFirst>(scores, decay, lane);
    const Columns<In, kTokenBox<In>> values(v, col0 / 8, afresh(lane));
#pragma unroll
    for (int block = 0; block < kFirst + kTilesDown; block++) {
      Four<kProducts> left[kTilesDown][2];
#pragma unroll
      for (int m = 0; m < kTilesDown; m++) {
        if (block > kFirst + m) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float (&p0)[4] = scores[m][2 * block], (&p1)[4] = scores[m][2 * block + 1];
          const float p[4] = {p0[2 * half], p0[2 * half + 1], p1[2 * half], p1[2 * half + 1]};
          left[m][half].set_left(p);
        }
      }
      add_products<Given<In, kProducts>, kPairs, kTilesAcross>(
          left, values, block, add_to_y, [=](int m, int) { return block <= kFirst + m; });
    }
  }

  template <bool kWild, int kFirst, int kScoreTiles>
  static __device__ __forceinline__ void weigh_all(float (&scores)[kTilesDown][kScoreTiles][4],
                                                   const Decay& decay, int lane) {
#pragma unroll
    for (int m = 0; m < kTilesDown; m++)
#pragma unroll
      for (int n = 0; n < 2 * (kFirst + m + 1); n++)
        weigh<kWild>(scores[m][n], decay, kFirst + m, n, lane);
  }

  // Scores of a block of queries with 8 keys, times their decays.
  template <bool kWild>
  static __device__ __forceinline__ void weigh(float (&a)[4], const Decay& decay, int block,
                                               int key_tile, int lane) {
    const int col = key_tile % 2 * 8 + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = lane / 4 + half * 8;
      float &left = a[2 * half], &right = a[2 * half + 1];
      left = given<kWild>(left), right = given<kWild>(right);
      if (key_tile / 2 < block) {
        const float2 to_end = *reinterpret_cast<const float2*>(&decay.to_block_end[col]);
        left = times<kWild>(times<kWild>(left, decay.in_block[row]), to_end.x);
        right = times<kWild>(times<kWild>(right, decay.in_block[row]), to_end.y);
      } else {  // above the diagonal a score may be anything, NaN too: it is not multiplied away
        const float2 all = *reinterpret_cast<const float2*>(&decay.diagonal[block][row][col]);
        left = col <= row ? times<kWild>(left, all.x) : 0.f;
        right = col < row ? times<kWild>(right, all.y) : 0.f;
      }
    }
  }
};
