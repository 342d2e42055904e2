// The state under the delta rule in chunks of 16 tokens, by warps that keep 16 columns of V each.
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
  Pair<S::kProducts> errors[2][2];               // [eight tokens][row lane / 4 or 8 below]
  int col0, lane;

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

  __device__ __forceinline__ void publish(Slot<S>& to) const {
    float* const row = to.state + (col0 + lane / 4) * S::kRow + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(row + half * 8 * S::kRow + n * 8) = {x[n][2 * half],
                                                                        x[n][2 * half + 1]};
  }

  __device__ __forceinline__ void read(const Slot<S>& from) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      given[half] = read_group(from.errors, col0 + lane / 4 + half * 8, lane);
    if (S::kFew)
#pragma unroll
      for (int n = 0; n < S::kKeyTiles; n++) read_writes(from, n);
  }

  __device__ __forceinline__ void read_writes(const Slot<S>& from, int n) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      writes[S::kFew ? n : 0][half] = pair_at<S::kRow>(from.writes, lane / 4 + half * 8, n, lane);
  }

  // errors <- errors + writes S
  __device__ __forceinline__ void find_errors(Slot<S>& slot) {
    Sum<S::kProducts> sum[2];  // of eight tokens
#pragma unroll
    for (int n = 0; n < S::kKeyTiles; n++) {
      if (!S::kFew) read_writes(slot, n);
      Pair<S::kProducts> left[2], right[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 w = writes[S::kFew ? n : 0][half];
        left[half].set_left(x[n][2 * half], x[n][2 * half + 1]);
        right[half].set_right(w.x, w.y);
      }
      add_products(sum, left, right);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int i = 0; i < 4; i++) given[half].x[i] += sum[i / 2].total(2 * half + i % 2);
      *reinterpret_cast<Run<float, 4>*>(
          slot.errors + group_at(col0 + lane / 4 + half * 8, lane % 4)) = given[half];
#pragma unroll
      for (int eight = 0; eight < 2; eight++)
        errors[eight][half].set_left(given[half].x[2 * eight], given[half].x[2 * eight + 1]);
    }
  }

  // S <- whole S + sum_j to_end_j k_j e_j^T
  __device__ __forceinline__ void advance(const Slot<S>& slot) {
#pragma unroll
    for (int first = 0; first < S::kKeyTiles; first += kTogether) advance(slot, first);
  }

 private:
  static constexpr int kTogether =
      S::kKeyTiles % 4 == 0 ? 4 : (S::kKeyTiles % 3 == 0 ? 3 : S::kKeyTiles);

  // The same for tiles from the first on.
  __device__ __forceinline__ void advance(const Slot<S>& slot, int first) {
    const float whole = slot.whole, rest = slot.whole_rest;
    float added[kTogether][4];  // few tiles have a sum of their own for products of big numbers
    Pair<S::kProducts> keys[2][kTogether];
#pragma unroll
    for (int n = 0; n < kTogether; n++) {
      const auto four = read_group(slot.keys, (first + n) * 8 + lane / 4, lane);
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
          [&](int pass, int n) -> float (&)[4] {
            return S::kFew && pass == S::kProducts - 1 ? added[n] : carry[first + n];
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
  keeper.clear_carry();
  keeper.each([&](float& s, int row, int j) {
    const int col = warp * 16 + j;
    s = 0;
    if (a.initial_state && row < S::K && col < S::V)
      s = static_cast<const float*>(
          a.initial_state)[item.n * a.state_stride[0] + item.h * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
  });
  Turn<S::kSlots> now, next;
  const auto read = [&](int c) {
    if (c >= chunks) return;
    shared.prepared[next.slot].wait(next.parity);
    keeper.read(shared.slots[next.slot]);
    next.skip(1);
  };
  read(0);
#pragma unroll 1
  for (int c = 0; c < chunks; c++, now.skip(1)) {
    Slot<S>& slot = shared.slots[now.slot];
    keeper.publish(slot);
    keeper.find_errors(slot);
    arrive(shared.known[now.slot], lane);
    read(c + 1);
    keeper.advance(slot);
    arrive(shared.used[now.slot], lane);
  }
  if (a.state) {
    float* const kept = static_cast<float*>(a.state) + item.nh * (S::K * S::V);
    keeper.each([&](float& s, int row, int j) {
      const int col = warp * 16 + j;
      if (row < S::K && col < S::V) kept[row * S::V + col] = s;
    });
  }
}
