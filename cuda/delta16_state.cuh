// The state under the delta rule in chunks of 16 tokens, by warps that keep 16 columns of V each
// and make their outputs.
#pragma once
#include "delta16_shape.cuh"

// The transposed state of one warp: tiles of 8 rows of K, as mma leaves them, and what roundings
// took from them. What does not wait for the state is read before it is wanted, as far as there are
// registers for it.
template <class S>
struct Keeper {
  float x[S::kKeyTiles][4], carry[S::kKeyTiles][4];
  Run<float, 4> given[2];                        // W v, rows lane / 4 and 8 below
  float2 writes[S::kFew ? S::kKeyTiles : 1][2];  // of tokens lane / 4 and 8 behind
  float2 queries[S::kFew ? S::kKeyTiles : 1][2];
  Pair<S::kProducts> errors[2][2];  // [eight tokens][row lane / 4 or 8 below]
  float y[2][4];                    // [eight tokens]: rows as those of errors
  int col0, lane;
  int pair, group;  // where this lane's two neighbours of a row, and its group of a row, lie

  // f(value, row of K, column of V), the latter counted from those of the warp.
  template <class F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) f(x[n][i], n * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8);
  }

  __device__ __forceinline__ void clear_carry() {
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) carry[n][i] = 0;
  }

  __device__ __forceinline__ void read(const Slot<S>& from, const float* q) {
    if (!S::kFew) return;
    read_given(from);
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++) read_tile(from, q, n);
  }

  // errors <- W v + writes S, and y <- d q S
  __device__ __forceinline__ void meet_state(const Slot<S>& slot, const float* q,
                                             const Decay& decay) {
    Sum<S::kProducts> of_writes[2], of_queries[2];  // of eight tokens
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++) {
      if (!S::kFew) read_tile(slot, q, n);
      Pair<S::kProducts> left[2], right[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        left[half].set_left(x[n][2 * half], x[n][2 * half + 1]);
        set_right(right[half], writes[S::kFew ? n : 0][half]);
      }
      add_products(of_writes, left, right);
#pragma unroll
      for (int half = 0; half < 2; half++) set_right(right[half], queries[S::kFew ? n : 0][half]);
      add_products(of_queries, left, right);
    }
    if (!S::kFew) read_given(slot);
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < 4; i++) given[half].x[i] += of_writes[i / 2].total(2 * half + i % 2);
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
        errors[eight][half].set_left(given[half].x[2 * eight], given[half].x[2 * eight + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float2 weight =
          *reinterpret_cast<const float2*>(decay.from_start + n * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; i++)
        y[n][i] = of_queries[n].total(i) * (i % 2 == 0 ? weight.x : weight.y);
    }
  }

  // y <- y + scores errors
  __device__ __forceinline__ void meet_errors(const Slot<S>& slot) {
    Sum<S::kProducts> sum[2];
    Pair<S::kProducts> right[2][2];  // [eight tokens]
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const auto four = read_group(slot.scores, n * 8);
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
        right[eight][n].set_right(four.x[2 * eight], four.x[2 * eight + 1]);
    }
#pragma unroll
    for (int eight = 0; eight < 2; eight++) add_products(sum, errors[eight], right[eight]);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] += sum[n].total(i);
  }

  // Of the first `tokens` of a chunk. `to` is that of token lane % 4 * 2 and column lane / 4.
  __device__ __forceinline__ void put_outputs(typename S::In* to, long long stride, int tokens,
                                              float scale) const {
    if (tokens >= kChunk)
      put_outputs<true>(to, stride, tokens, scale);
    else
      put_outputs<false>(to, stride, tokens, scale);
  }

  // S <- whole S + sum_j to_end_j k_j e_j^T
  __device__ __forceinline__ void advance(const Slot<S>& slot, const Decay& decay) {
#pragma unroll
    for (int first = 0; first < S::kKeyTiles; first += kTogether) advance(slot, decay, first);
  }

 private:
  template <bool kAll>
  __device__ __forceinline__ void put_outputs(typename S::In* to, long long stride, int tokens,
                                              float scale) const {
    using In = typename S::In;
    const bool first = S::V % 16 == 0 || col0 + lane / 4 < S::V;
    const bool second = S::V % 16 == 0 || col0 + lane / 4 + 8 < S::V;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool real = kAll || n * 8 + lane % 4 * 2 + i < tokens;
        In* const row = i == 0 ? to : to + stride;
        if (real && first) row[0] = Narrow<In>::from(scale * y[n][i]);
        if (real && second) row[8] = Narrow<In>::from(scale * y[n][2 + i]);
        if (i == 1) to += 8 * stride;
      }
  }
  __device__ __forceinline__ float2 read_pair(const float* rows, int half, int tile) const {
    return *reinterpret_cast<const float2*>(rows + half * 8 * S::kRow + tile * 8 + pair);
  }
  // Of a row of groups, `row` before that of this lane, a multiple of 8.
  __device__ __forceinline__ Run<float, 4> read_group(const float* rows, int row) const {
    return *reinterpret_cast<const Run<float, 4>*>(rows + row * kChunk + group);
  }
  __device__ __forceinline__ void read_given(const Slot<S>& from) {
#pragma unroll
    for (int half = 0; half < 2; half++) given[half] = read_group(from.errors, col0 + half * 8);
  }
  __device__ __forceinline__ void read_tile(const Slot<S>& from, const float* q, int n) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      writes[S::kFew ? n : 0][half] = read_pair(from.writes, half, n);
      queries[S::kFew ? n : 0][half] = read_pair(q, half, n);
    }
  }
  static __device__ __forceinline__ void set_right(Pair<S::kProducts>& to, float2 x) {
    to.set_right(x.x, x.y);
  }

  static constexpr int kTogether =
      S::kKeyTiles % 4 == 0 ? 4 : (S::kKeyTiles % 3 == 0 ? 3 : S::kKeyTiles);

  // The same for tiles from the first on.
  __device__ __forceinline__ void advance(const Slot<S>& slot, const Decay& decay, int first) {
    const float whole = decay.whole, rest = decay.whole_rest;
    float added[kTogether][4];  // few tiles have a sum of their own for products of big numbers
    Pair<S::kProducts> keys[2][kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; n++) {
      const auto four = read_group(slot.keys, (first + n) * 8);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& c = carry[first + n][i];
        c = whole * c + rest * x[first + n][i];
        added[n][i] = 0;
      }
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
        keys[eight][n].set_right(four.x[2 * eight], four.x[2 * eight + 1]);
    }
#pragma unroll
    for (int eight = 0; eight < 2; eight++)
      add_products(
          [&](int part, int n) -> float (&)[4] {
            return S::kFew && part == Sum<S::kProducts>::kBig ? added[n] : carry[first + n];
          },
          errors[eight], keys[eight]);
#pragma unroll
    for (int n = 0; n < kTogether; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float &to = x[first + n][i], &c = carry[first + n][i];
        const float before = to, more = S::kFew ? added[n][i] + c : c;
        to = fmaf(whole, before, more);
        c = fmaf(whole, before, -to) + more;
      }
  }
};

// A part of the state through all chunks.
template <class S>
__device__ __forceinline__ void keep_state(const CallArgs& a, Shared<S>& shared, int warp,
                                           int lane) {
  const Item& item = shared.item;
  const int chunks = item.chunks;
  Keeper<S> keeper;
  keeper.col0 = warp * 16;
  keeper.lane = lane;
  keeper.pair = afresh(lane / 4 * S::kRow + lane % 4 * 2);
  keeper.group = afresh(group_at(lane / 4, lane % 4));
  keeper.clear_carry();
  keeper.each([&](float& s, int row, int j) {
    const int col = warp * 16 + j;
    s = 0;
    if (a.initial_state && row < S::K && col < S::V)
      s = static_cast<const float*>(
          a.initial_state)[item.n * a.state_stride[0] + item.h * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
  });
  // where there are registers for it, what is made of it is made once
  const long long stride = S::kFew ? afresh(a.y_stride[1]) : a.y_stride[1];
  typename S::In* y =
      static_cast<typename S::In*>(a.y) + item.y + warp * 16 + lane / 4 + lane % 4 * 2 * stride;
  const float scale = afresh(static_cast<float>(a.scale));
  int left = item.tokens;
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot, next;
  const auto read = [&](int c, int from) {
    if (c >= chunks) return;
    shared.prepared[next.slot].wait(next.parity);
    keeper.read(shared.slots[next.slot], shared.queries(from));
    next.skip(1);
  };
  read(0, 0);
#pragma unroll 1
  for (int c = 0; c < chunks; c++) {
    const Slot<S>& prepared = shared.slots[slot.slot];
    const Decay& decay = shared.decays[stage.slot];
    const int from = stage.slot;
    if (!S::kFew) keeper.lane = afresh(lane);  // few registers are left for addresses
    keeper.meet_state(prepared, shared.queries(from), decay);
    stage.skip(1);
    read(c + 1, stage.slot);
    keeper.advance(prepared, decay);
    keeper.meet_errors(prepared);
    __syncwarp();
    arrive_together(shared.used[slot.slot], lane);
    arrive_together(shared.free[from], lane);
    keeper.put_outputs(y, stride, left, scale);
    y += kChunk * stride;
    left -= kChunk;
    slot.skip(1);
  }
  if (a.state) {
    float* const kept = static_cast<float*>(a.state) + item.nh * (S::K * S::V);
    keeper.each([&](float& s, int row, int j) {
      const int col = warp * 16 + j;
      if (row < S::K && col < S::V) kept[row * S::V + col] = s;
    });
  }
}

// Zeros for tokens of no sequence, by the state's warps.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item, int thread) {
  using In = typename S::In;
  In* const y = static_cast<In*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = thread; e < (a.T - item.stop) * S::V; e += 32 * S::kStateWarps)
    y[e / S::V * a.y_stride[1] + e % S::V] = In{};
}
