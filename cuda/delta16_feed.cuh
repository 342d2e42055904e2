// Roles of cuda/delta16.cu that feed the others: decays, and copies of q, k and v.
#pragma once
#include "delta16_shape.cuh"

// Decays by warps, one token a lane of two chunks, every kDecayWarps-th two chunks each. Each gate
// is a read of its own, far from the next one: it is under way for the time of those chunks.
template <class S>
__device__ __forceinline__ void make_decays(const CallArgs& a, Shared<S>& shared, int warp,
                                            int lane) {
  constexpr int kStep = 2 * S::kDecayWarps * kChunk;
  const Item& item = shared.item;
  const int tokens = item.tokens;
  const int begin = warp * 2 * kChunk;
  const long long first = item.start + begin + lane;
  long long gate_at =
      item.b * a.gate_stride[0] + first * a.gate_stride[1] + item.h * a.gate_stride[2];
  long long beta_at =
      item.b * a.beta_stride[0] + first * a.beta_stride[1] + item.h * a.beta_stride[2];
  Scalar<typename S::In> gate, beta;
  const auto fetch = [&](int t) {
    if (t >= tokens) return;
    gate.load(a.gate, gate_at, a.gate_kind);
    beta.load(a.beta, beta_at, a.beta_kind);
    gate_at += kStep * a.gate_stride[1];
    beta_at += kStep * a.beta_stride[1];
  };
  fetch(begin + lane);
  Turn<S::kStages> stage;
  stage.skip(2 * warp);
#pragma unroll 1
  for (int t = begin + lane; t - lane < tokens; t += kStep, stage.skip(2 * S::kDecayWarps)) {
    double g = 1;
    float b = 0;
    if (t < tokens) {
      g = nan_if_infinite(gate.template value<double>(a.gate_kind));
      b = nan_if_infinite(beta.template value<float>(a.beta_kind));
    }
    fetch(t + kStep);
    const bool wild = grows(g, fabsf(1 - b));
#pragma unroll
    for (int i = 0; i < 2; i++) shared.free[stage.slot + i].wait(stage.parity ^ 1);
    Decay& to = shared.decays[stage.slot + lane / kChunk];
    if (__builtin_expect(__any_sync(0xffffffffu, wild), 0)) {
      fill_between<true>(to, lane, float(g), b);
      fill_decays<true>(to, wild, lane, g, b);
    } else {
      fill_between<false>(to, lane, float(g), b);
      fill_decays<false>(to, false, lane, g, b);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) arrive(shared.made[stage.slot + i], lane);
  }
}

// One of q, k and v: kCols numbers a row, into rows of shared memory by one warp.
template <class S, int kCols, int kRows>
struct Copier {
  using In = typename S::In;
  static constexpr int kVectors = kCols / S::kWide, kEach = (kRows * kVectors + 31) / 32;
  static_assert(kCols % S::kWide == 0, "rows of whole vectors");
  static constexpr int kUnrolled = S::kWide > 1 ? kEach : 4;
  const In* from;
  long long stride;
  Run<In, S::kWide> held[S::kHeld ? kEach : 1];

  // f(number, row, column) of this lane's vectors.
  template <class F>
  static __device__ __forceinline__ void each(int lane, F f) {
#pragma unroll(kUnrolled)
    for (int i = 0; i < kEach; i++) {
      const int e = lane + 32 * i;
      if (kRows * kVectors % 32 == 0 || e < kRows * kVectors)
        f(i, e / kVectors, e % kVectors * S::kWide);
    }
  }

  __device__ __forceinline__ void copy(float* to, int rows, int lane) {
    if (rows >= kRows)
      copy_rows<true>(to, rows, lane);
    else
      copy_rows<false>(to, rows, lane);
    from += kRows * stride;
  }
  template <bool kAll>
  __device__ __forceinline__ void copy_rows(float* to, int rows, int lane) const {
    each(lane, [&](int, int row, int at) {
      const bool real = kAll || row < rows;
      float* const goal = to + row * S::kRow + at;
      const In* const source = from + (real ? row * stride + at : 0);
      if constexpr (sizeof(In) == 4)
        cp_async<4 * S::kWide>(goal, source, real ? 4 * S::kWide : 0);
      else
        *goal = real ? widen<float>(*source) : 0.f;
    });
  }

  // The same by way of registers.
  __device__ __forceinline__ void fetch(int rows, int lane) {
    each(lane, [&](int i, int row, int at) {
      held[i] = {};
      if (row < rows)
        held[i] = *reinterpret_cast<const Run<In, S::kWide>*>(from + row * stride + at);
    });
    from += kRows * stride;
  }
  __device__ __forceinline__ void put(float* to, int first, int lane) const {
    each(lane, [&](int i, int row, int at) {
      if (row < first || row >= first + kChunk) return;
#pragma unroll
      for (int j = 0; j < S::kWide; j += 4)
        *reinterpret_cast<float4*>(to + (row - first) * S::kRow + at + j) = {
            widen<float>(held[i].x[j]), widen<float>(held[i].x[j + 1]),
            widen<float>(held[i].x[j + 2]), widen<float>(held[i].x[j + 3])};
    });
  }
};

// Rows of q and k to unit length, a lane each.
template <class S>
__device__ __forceinline__ void normalise_rows(float* rows, int lane) {
  float4* const row = reinterpret_cast<float4*>(rows + lane * S::kRow);
  float sum[4] = {};
#pragma unroll(4)
  for (int i = 0; i < 2 * S::kKeyTiles; i++) {
    const float4 x = row[i];
    sum[0] += x.x * x.x, sum[1] += x.y * x.y, sum[2] += x.z * x.z, sum[3] += x.w * x.w;
  }
  const float factor = 1.f / sqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f);
  // padding stays 0 where a row is not a number, as no copy writes there
  const auto scaled = [&](float x, int col) {
    return S::K % 8 == 0 || col < S::K ? x * factor : 0.f;
  };
#pragma unroll(4)
  for (int i = 0; i < 2 * S::kKeyTiles; i++) {
    const float4 x = row[i];
    row[i] = {scaled(x.x, 4 * i), scaled(x.y, 4 * i + 1), scaled(x.z, 4 * i + 2),
              scaled(x.w, 4 * i + 3)};
  }
}

// By one warp. Float32 is copied into its place, and who normalises waits for a chunk while the
// next one is under way; vectors of float16 are widened, two chunks at a time.
template <class S>
__device__ __forceinline__ void copy(const CallArgs& a, Shared<S>& shared, int lane) {
  using In = typename S::In;
  constexpr int kRows = S::kHeld ? 2 * kChunk : kChunk;
  const Item& item = shared.item;
  const long long hq = item.h / a.group;
  const int tokens = item.tokens, chunks = item.chunks;
  Copier<S, S::K, kRows> q, k;
  Copier<S, S::V, kRows> v;
  q.from = static_cast<const In*>(a.q) + item.b * a.q_stride[0] + hq * a.q_stride[2] +
           item.start * a.q_stride[1];
  k.from = static_cast<const In*>(a.k) + item.b * a.k_stride[0] + hq * a.k_stride[2] +
           item.start * a.k_stride[1];
  v.from = static_cast<const In*>(a.v) + item.b * a.v_stride[0] + item.h * a.v_stride[2] +
           item.start * a.v_stride[1];
  q.stride = a.q_stride[1], k.stride = a.k_stride[1], v.stride = a.v_stride[1];
  Turn<S::kStages> stage;
  if constexpr (S::kHeld) {
    const auto fetch = [&](int t) {
      q.fetch(tokens - t, lane);
      k.fetch(tokens - t, lane);
      v.fetch(tokens - t, lane);
    };
#pragma unroll 1
    for (int c = -2; c < chunks; c += 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (c < 0) break;
        const int slot = stage.slot + i;
        shared.free[slot].wait(stage.parity ^ 1);
        q.put(shared.queries(slot), i * kChunk, lane);
        k.put(shared.keys(slot), i * kChunk, lane);
        v.put(shared.values(slot), i * kChunk, lane);
        if (S::kNormalise) {
          __syncwarp();
          normalise_rows<S>(shared.stages[slot], lane);
        }
        shared.loaded[slot].arrive();
      }
      if (c >= 0) stage.skip(2);
      fetch((c + 2) * kChunk);
    }
  } else {
    Turn<S::kStages> landed;
#pragma unroll 1
    for (int c = 0; c < chunks + S::kNormalise; c++) {
      if (c < chunks) {
        const int slot = stage.slot, rows = tokens - c * kChunk;
        shared.free[slot].wait(stage.parity ^ 1);
        q.copy(shared.queries(slot), rows, lane);
        k.copy(shared.keys(slot), rows, lane);
        v.copy(shared.values(slot), rows, lane);
        if (!S::kNormalise && sizeof(In) == 4)
          shared.loaded[slot].arrive_after_copies();
        else if (!S::kNormalise)
          shared.loaded[slot].arrive();
        stage.skip(1);
      }
      if (!S::kNormalise) continue;
      cp_async_commit();
      if (c == 0) continue;
      cp_async_wait<1>();
      __syncwarp();
      normalise_rows<S>(shared.stages[landed.slot], lane);
      shared.loaded[landed.slot].arrive();
      landed.skip(1);
    }
  }
}
