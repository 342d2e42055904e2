// Outputs under the delta rule in chunks of 16 tokens, a chunk a warp.
#pragma once
#include "delta16_shape.cuh"

template <class S>
struct Outputs {
  static constexpr bool kKept = S::kKeyTiles <= 4;  // queries, between products
  static constexpr int kUnrolled = kKept ? S::kKeyTiles : 2;
  Pair<S::kProducts> queries[kKept ? S::kKeyTiles : 1]
                            [2];    // [8 rows of K][row lane / 4 or 8 below]
  Pair<S::kProducts> scores[2][2];  // [8 keys][the same]
  float y[S::kValueTiles][4];
  int lane;

  // What needs no state.
  __device__ __forceinline__ void compare(const float* q, const float* k, const Decay& decay) {
    Sum<S::kProducts> sum[2];
#pragma unroll(kUnrolled)
    for (int tile = 0; tile < S::kKeyTiles; tile++) {
      Pair<S::kProducts>(&left)[2] = queries[kKept ? tile : 0];
      Pair<S::kProducts> right[2];
      read_queries(left, q, tile);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = pair_at<S::kRow>(k, lane / 4 + i * 8, tile, lane);
        right[i].set_right(x.x, x.y);
      }
      add_products(sum, left, right);
    }
    if (__builtin_expect(decay.wild, 0))
      weigh<true>(sum, decay);
    else
      weigh<false>(sum, decay);
  }

  __device__ __forceinline__ void make(const float* q, const Slot<S>& slot, const Decay& decay) {
    const auto sum = [&](int, int n) -> float (&)[4] { return y[n]; };
    clear();
#pragma unroll(kUnrolled)
    for (int tile = 0; tile < S::kKeyTiles; tile++) {
      Pair<S::kProducts>(&left)[2] = queries[kKept ? tile : 0];
      Pair<S::kProducts> right[S::kValueTiles];
      if (!kKept) read_queries(left, q, tile);
#pragma unroll
      for (int n = 0; n < S::kValueTiles; n++) {
        const float2 x = pair_at<S::kRow>(slot.state, n * 8 + lane / 4, tile, lane);
        right[n].set_right(x.x, x.y);
      }
      add_products(sum, left, right);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float weight = decay.from_start[lane / 4 + i / 2 * 8];
#pragma unroll
      for (int n = 0; n < S::kValueTiles; n++) y[n][i] *= weight;
    }
    Pair<S::kProducts> right[2][S::kValueTiles];
#pragma unroll
    for (int n = 0; n < S::kValueTiles; n++) {
      const auto four = read_group(slot.errors, n * 8 + lane / 4, lane);
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
        right[eight][n].set_right(four.x[2 * eight], four.x[2 * eight + 1]);
    }
#pragma unroll
    for (int eight = 0; eight < 2; eight++) add_products(sum, scores[eight], right[eight]);
  }

 private:
  template <bool kWild>
  __device__ __forceinline__ void weigh(const Sum<S::kProducts> (&sum)[2], const Decay& decay) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {  // above the diagonal a score may be anything, NaN too
          const int row = lane / 4 + half * 8, col = n * 8 + lane % 4 * 2 + i;
          p[i] = n <= half && col <= row
                     ? times<kWild>(sum[n].total(2 * half + i), decay.between[row][col])
                     : 0.f;
        }
        scores[n][half].set_left(p[0], p[1]);
      }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < S::kValueTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) y[n][i] = 0;
  }

  __device__ __forceinline__ void read_queries(Pair<S::kProducts> (&to)[2], const float* q,
                                               int tile) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 x = pair_at<S::kRow>(q, lane / 4 + i * 8, tile, lane);
      to[i].set_left(x.x, x.y);
    }
  }
};

// Every kTurns-th chunk.
template <class S>
__device__ __forceinline__ void make_outputs(const CallArgs& a, Shared<S>& shared, int turn,
                                             int lane) {
  using In = typename S::In;
  const Item& item = shared.item;
  const int chunks = item.chunks, tokens = item.tokens, col = lane % 4 * 2;
  const float scale = static_cast<float>(a.scale);
  const long long stride = a.y_stride[1];
  In* const y = static_cast<In*>(a.y) + item.y + col;
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot;
  stage.skip(turn);
  slot.skip(turn);
  Outputs<S> out;
  out.lane = lane;
#pragma unroll 1
  for (int c = turn; c < chunks; c += S::kTurns) {
    const Decay& decay = shared.decays[stage.slot];
    const float* const q = shared.queries(stage.slot);
    shared.loaded[stage.slot].wait(stage.parity);
    shared.made[stage.slot].wait(stage.parity);
    out.compare(q, shared.keys(stage.slot), decay);
    shared.known[slot.slot].wait(slot.parity);
    out.make(q, shared.slots[slot.slot], decay);
    arrive(shared.used[slot.slot], lane);
    if (lane == 0) shared.free[stage.slot].arrive();
    stage.skip(S::kTurns);
    slot.skip(S::kTurns);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = c * kChunk + half * 8 + lane / 4;
      In* const row = y + t * stride;
      if (t >= tokens) continue;
#pragma unroll
      for (int n = 0; n < S::kValueTiles; n++) {
        const float y0 = scale * out.y[n][half * 2], y1 = scale * out.y[n][half * 2 + 1];
        if (S::kWide > 1) {
          if (n * 8 + col < S::V) store_pair(row + n * 8, y0, y1);
        } else {
          if (n * 8 + col < S::V) row[n * 8] = Narrow<In>::from(y0);
          if (n * 8 + col + 1 < S::V) row[n * 8 + 1] = Narrow<In>::from(y1);
        }
      }
    }
  }
}

// Zeros for tokens of no sequence, by the warps that make outputs.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item, int thread) {
  using In = typename S::In;
  In* const y = static_cast<In*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = thread; e < (a.T - item.stop) * S::V; e += 32 * S::kTurns)
    y[e / S::V * a.y_stride[1] + e % S::V] = In{};
}
