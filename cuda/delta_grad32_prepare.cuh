// Kernels that make, of all chunks at once, what the walks of delta_grad32.cu need before any state
// is known; and rows of q and k of unit length.
#pragma once
#include "delta_grad32_space.cuh"
#include "tf32_blocks.cuh"

constexpr int kPrepareThreads = 64 * kBlocks;

// Above either a chunk is strained: sums of squares of decayed products of its keys, and of A. Keys
// of any direction make 496 / K of the first; those that leave much of K alone make more, and
// states grow where no key reads them.
template <int K>
constexpr float kMostAlike = 868.f / K;
constexpr float kMostErrors = 16;

template <int K>
struct PrepareShape {
  static constexpr int kRowTiles = (K + 15) / 16;
  static constexpr int kKeyRow = kRowTiles * 16 + 8;  // pairs of numbers in different banks
  static constexpr int kRowsOfK = kChunk * kKeyRow, kPairs = kChunk * kPairRow;
  static constexpr int kBytes =
      4 * (2 * kRowsOfK + 2 * kPairs) + static_cast<int>(sizeof(ChunkWeights));
};

// Two neighbouring numbers of a row, plain or in planes.
__device__ __forceinline__ void put(float* row, int col, float x, float y, bool plain) {
  SplitPair both;
  both.set(x, y);
  if (plain)
    *reinterpret_cast<float2*>(row + col) = {x, y};
  else
    put_pair(row, col, both);
}

// grid: slots * H. block: kPrepareThreads.
template <int K, bool kWide>
__global__ void __launch_bounds__(kPrepareThreads, 5)
    delta_grad32_prepare(const CallArgs a, const SpaceArgs space) {
  using S = PrepareShape<K>;
  static_assert(!kWide || K % 4 == 0, "rows of whole vectors");
  DYNAMIC_SHARED(float, shared);
  float *const q = shared, *const k = q + S::kRowsOfK, *const products = k + S::kRowsOfK;
  float* const errors = products + S::kPairs;  // A
  ChunkWeights& weights = *reinterpret_cast<ChunkWeights*>(errors + S::kPairs);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const long long item = blockIdx.x, h = item % a.H;
  const SlotChunk chunk(a, item / a.H);
  if (chunk.tokens == 0) return;
  Prepared& to = space.prepared[item];
  copy_rows<kChunk, S::kRowTiles * 16, S::kKeyRow, kWide, kPrepareThreads>(
      q, head_rows(a.q, a.q_stride, chunk.b, chunk.first, h / a.group), a.q_stride[1], chunk.tokens,
      K, threadIdx.x);
  copy_rows<kChunk, S::kRowTiles * 16, S::kKeyRow, kWide, kPrepareThreads>(
      k, head_rows(a.k, a.k_stride, chunk.b, chunk.first, h / a.group), a.k_stride[1], chunk.tokens,
      K, threadIdx.x);
  cp_async_commit();
  if (warp == 0) {
    weigh(weights, a, chunk, h, lane);
    __syncwarp();
    put_products(products, weights, lane);
  }
  cp_async_wait<0>();
  __syncthreads();

  const int r = warp % kBlocks;
  const bool of_k = warp / kBlocks;
  const float scale = of_k ? 1.f : static_cast<float>(a.scale);
  float sum[kBlocks][2][4] = {}, alike = 0, squares = 0;
  for (int i = 0; i < S::kRowTiles; i++) {
    const Factor left =
        load_left_factor((of_k ? k : q) + r * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
#pragma unroll
    for (int c = 0; c < kBlocks; c++)
      if (c <= r)
        multiply(
            sum[c], left,
            load_right_factor_transposed(k + c * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane));
  }
#pragma unroll
  for (int c = 0; c < kBlocks; c++)
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int at = r * kBlock + lane / 4 + i / 2 % 2 * 8;
      const int first = c * kBlock + i / 4 * 8 + lane % 4 * 2;
      float (&own)[4] = sum[c][i / 4];
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int j = first + side;
        float& x = own[i % 4 + side];
        const bool real = j + of_k <= at;
        const float decay = products[at * kPairRow + j], key = real ? decay * x : 0.f;
        x = real ? decay * weights.beta[j] * scale * x : 0.f;
        alike += key * key;
        squares += x * x;
      }
      if (of_k)
        *reinterpret_cast<float2*>(errors + at * kPairRow + first) = {own[i % 4], own[i % 4 + 1]};
    }
  if (of_k) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      alike += __shfl_xor_sync(0xffffffffu, alike, step);
      squares += __shfl_xor_sync(0xffffffffu, squares, step);
    }
    const float beta = weights.beta[lane];
    const bool turns = __any_sync(0xffffffffu, !(beta >= 0 && beta <= 1));
    if (lane == 0)
      weights.strain[r] = turns ? 2.f : fmaxf(alike / kMostAlike<K>, squares / kMostErrors);
  }
  __syncthreads();
  const bool strained = !(weights.strain[0] + weights.strain[1] <= 1);
  if (!of_k)
#pragma unroll
    for (int c = 0; c < kBlocks; c++)
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        if (c > r) continue;
        float* const row = to.scores + (r * kBlock + lane / 4 + i / 2 % 2 * 8) * kChunk;
        const float (&own)[4] = sum[c][i / 4];
        put(row, c * kBlock + i / 4 * 8 + lane % 4 * 2, own[i % 4], own[i % 4 + 1], strained);
      }
  if (warp == 0) {  // by substitution, a column a lane
    float x[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      float sums[2] = {i == lane ? 1.f : 0.f, 0.f};
#pragma unroll
      for (int j = 0; j < i; j++) sums[j % 2] -= errors[i * kPairRow + j] * x[j];
      x[i] = sums[0] + sums[1];
    }
    // an even lane puts the high parts of two columns, the next one the low ones
    const int at = pair_at(lane - lane % 2) + lane % 2 * 4;
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], 1);
      SplitPair both;
      both.set(lane % 2 ? other : x[i], lane % 2 ? x[i] : other);
      const float part = __uint_as_float(lane % 2 ? both.low : both.high);
      if (i >= kBlock || lane < kBlock)
        to.inverse[i * kChunk + (strained ? lane : at)] = strained ? x[i] : part;
    }
  } else {
    const float* const from = reinterpret_cast<const float*>(&weights);
    constexpr int kCount = sizeof(ChunkWeights) / 4 - 3;
    if (threadIdx.x == 32) to.weights.strained = strained;
    for (int i = threadIdx.x - 32; i < kCount; i += kPrepareThreads - 32)
      reinterpret_cast<float*>(&to.weights)[i] = from[i];
  }
}

// Rows of q and k of unit length, (B, T, Hq, K), contiguous. grid: any number of blocks; a warp
// takes one row at a time.
template <int K>
__global__ void __launch_bounds__(256, 1)
    delta_grad32_units(const CallArgs a, const GradArgs g, float* q, float* k) {
  constexpr int kEach = (K + 31) / 32;
  const int lane = threadIdx.x % 32;
  const long long heads = a.H / a.group, rows = g.B * a.T * heads;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  long long item = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  for (; item < 2 * rows; item += warps) {
    const bool of_k = item >= rows;
    const long long row = of_k ? item - rows : item;
    const long long b = row / heads / a.T, t = row / heads % a.T, h = row % heads;
    const float* const from =
        of_k ? head_rows(a.k, a.k_stride, b, t, h) : head_rows(a.q, a.q_stride, b, t, h);
    float x[kEach], squares = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      x[i] = lane + 32 * i < K ? from[lane + 32 * i] : 0.f;
      squares += x[i] * x[i];
    }
#pragma unroll
    for (int hop = 1; hop < 32; hop *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, hop);
    const float inverse = 1.f / sqrtf(squares + 1e-6f);
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < K) (of_k ? k : q)[row * K + lane + 32 * i] = inverse * x[i];
  }
}
