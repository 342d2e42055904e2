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
constexpr float kMostErrors = 12;
// Above this one too: errors of keys in few directions add up, as planes err alike each time. Twice
// the sum of squares of products of two keys, not decayed, over the square of the sum of squares of
// keys is nearly 1 where all are equal, and 1 / K on average where they have any direction.
constexpr float kMostOfOne = .25f;
// Of what a chunk leaves of a state, above which errors of many chunks add up.
constexpr float kLasting = .5f;
// So many betas past so much turn states about, and damp no errors.
constexpr int kMostTurns = 4;
constexpr float kTurns = 1.9f;

// Sums over the keys of a block of tokens: of squares of products with keys before them, not
// decayed, of their own squares, and of squares of A.
struct KeySums {
  float products, lengths, errors;
};

template <int K>
struct PrepareShape {
  static constexpr int kRowTiles = (K + 15) / 16;
  static constexpr int kKeyRow = kRowTiles * 16 + 8;  // pairs of numbers in different banks
  static constexpr int kRowsOfK = kChunk * kKeyRow, kPairs = kChunk * kPairRow;
  static constexpr int kScoresAt = kKeyRow < kPairRow ? 2 * kRowsOfK : 0;  // else in place of q
  static constexpr int kProductsAt = 2 * kRowsOfK + (kScoresAt > 0 ? kPairs : 0);
  static constexpr int kBytes = 4 * (kProductsAt + 2 * kPairs) +
                                static_cast<int>(sizeof(ChunkWeights) + kBlocks * sizeof(KeySums));
};

// Whether keys of a chunk are much alike; one key is.
__device__ __forceinline__ bool much_alike(const KeySums* sums, int tokens) {
  const float products = sums[0].products + sums[1].products;
  const float lengths = sums[0].lengths + sums[1].lengths;
  const float n = static_cast<float>(tokens);
  return !(2 * n * products < kMostOfOne * (n - 1) * lengths * lengths);
}

// The first number of q, v or dy at one of 8 tokens, 8 lanes each, or 0 where there are fewer: of
// 32 tokens at 0, 5, 8, 13, 18, 23, 26 and 31, as many even ones as odd ones.
__device__ __forceinline__ float sample(const CallArgs& a, const GradArgs& g,
                                        const SlotChunk& chunk, long long hq, long long h,
                                        int lane) {
  const int i = lane % 8, place = max(i, (4 * i + i % 2 + i / 4 * 2) * chunk.tokens / kChunk);
  const long long t = chunk.first + place;
  if (place >= chunk.tokens) return 0;
  if (lane < 8) return *head_rows(a.q, a.q_stride, chunk.b, t, hq);
  if (lane < 16) return *head_rows(a.v, a.v_stride, chunk.b, t, h);
  return lane < 24 && g.dy ? *head_rows(g.dy, g.dy_stride, chunk.b, t, h) : 0.f;
}

// Whether two of q, v and dy seem to be nearly the same at most tokens, or just the same at two,
// but for signs: products of the same numbers err alike, where planes do not hold them.
__device__ __forceinline__ bool seem_constant(float x, int tokens, int lane) {
  const unsigned own = 0xffu << (lane & 24);  // lanes of one array
  const float size = fabsf(x), first = __shfl_sync(0xffffffffu, size, lane & 24);
  const unsigned near = __ballot_sync(0xffffffffu, fabsf(size - first) < .125f * first);
  const unsigned bits = __float_as_uint(size), same = __match_any_sync(0xffffffffu, bits);
  const bool again = (bits & 0xff) != 0 && __popc(same & own) > 1;
  const bool alike = again || 8 * __popc(near & own) > 5 * min(tokens, 8);
  const unsigned arrays = __ballot_sync(0xffffffffu, alike);
  return ((arrays & 0xff) != 0) + ((arrays & 0xff00) != 0) + ((arrays & 0xff0000) != 0) > 1;
}

// A of a chunk that damps no errors, A_ij at i (i - 1) / 2 + j. A key that comes again and again
// makes the same error each time, so that it is in double; and nothing of it overflows there.
template <int kCols, int kRow>
__device__ __forceinline__ void put_errors(double* to, const float* k, const float* products,
                                           const ChunkWeights& weights, int thread) {
  const int j = thread % 32;
#pragma unroll 1
  for (int i = 1 + thread / 32; i < kChunk; i += kPrepareThreads / 32) {
    double sum = 0;
#pragma unroll 4
    for (int step = 0; step < kCols; step++) {
      const int col = (step + j) % kCols;  // in different banks
      sum += static_cast<double>(k[i * kRow + col]) * static_cast<double>(k[j * kRow + col]);
    }
    if (j < i)
      to[i * (i - 1) / 2 + j] = sum * static_cast<double>(products[i * kPairRow + j]) *
                                static_cast<double>(weights.beta[j]);
  }
}

// The inverse of I + A by one warp, by substitution, a column a lane.
__device__ __forceinline__ void invert_exactly(float* to, const double* errors, int lane) {
#pragma unroll 1
  for (int i = 0; i < kChunk; i++) {
    double sum = i == lane;
#pragma unroll 4
    for (int j = 0; j < i; j++)
      sum -= errors[i * (i - 1) / 2 + j] * static_cast<double>(to[j * kPairRow + lane]);
    to[i * kPairRow + lane] = bounded(static_cast<float>(sum));
  }
}

// The same of blocks: of those on the diagonal by substitution, and T_10 = -T_11 A_10 T_00.
__device__ __forceinline__ void invert(float* to, const float* errors, int lane) {
  float x[kBlock];
  const int at = lane / kBlock * kBlock * (kPairRow + 1), col = lane % kBlock;
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    float sums[2] = {i == col ? 1.f : 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < i; j++) sums[j % 2] -= errors[at + i * kPairRow + j] * x[j];
    x[i] = sums[0] + sums[1];
    to[at + i * kPairRow + col] = x[i];
  }
  __syncwarp();
  const int below = kBlock * kPairRow;
  float sum[2][4] = {}, t[2][4] = {};
  multiply(sum, load_left_factor(to + below + kBlock, kPairRow, lane),
           load_right_factor(errors + below, kPairRow, lane));
  Factor left;
  left.set(sum);
  multiply(t, left, load_right_factor(to, kPairRow, lane));
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    *reinterpret_cast<float2*>(to + below + (lane / 4 + i / 2 % 2 * 8) * kPairRow + i / 4 * 8 +
                               lane % 4 * 2) = {-t[i / 4][i % 4], -t[i / 4][i % 4 + 1]};
}

// Pairs of tokens to global memory, in planes or plain, but the block above the diagonal: a thread
// has 8 of a row.
constexpr int kPairPieces = 3 * kBlock * kBlock / 8;
__device__ __forceinline__ void put_pairs(float* to, const float* from, int thread, bool plain) {
  if (thread >= kPairPieces) return;
  const bool all = thread < 4 * kBlock;  // the first columns, of all rows
  const int row = all ? thread / 2 : thread / 2 - kBlock;
  const int col = (all ? 0 : kBlock) + thread % 2 * 8;
  const float4* const own = reinterpret_cast<const float4*>(from + row * kPairRow + col);
  Eight x;
  x.set(own[0], own[1]);
  if (plain) x = {own[0], own[1]};
  float4* const out = reinterpret_cast<float4*>(to + row * kChunk + col);
  out[0] = x.high;
  out[1] = x.low;
}

// grid: slots * H. block: kPrepareThreads.
template <int K, bool kWide>
__global__ void __launch_bounds__(kPrepareThreads, 7)
    delta_grad32_prepare(const CallArgs a, const GradArgs g, const SpaceArgs space) {
  using S = PrepareShape<K>;
  static_assert(!kWide || K % 4 == 0, "rows of whole vectors");
  DYNAMIC_SHARED(float, shared);
  float *const q = shared, *const k = q + S::kRowsOfK, *const products = shared + S::kProductsAt;
  float *const errors = products + S::kPairs, *const scores = shared + S::kScoresAt;  // A, and P
  float* const inverse = products;  // once these are no longer wanted
  ChunkWeights& weights = *reinterpret_cast<ChunkWeights*>(errors + S::kPairs);
  KeySums* const key_sums = reinterpret_cast<KeySums*>(&weights + 1);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const unsigned item = blockIdx.x, heads = static_cast<unsigned>(a.H), h = item % heads;
  const unsigned hq = h / static_cast<unsigned>(a.group);
  const SlotChunk chunk(a, item / heads);
  if (chunk.tokens == 0) return;
  Prepared& to = space.prepared[item];
  const bool of_k = warp / kBlocks;
  const int r = warp % kBlocks;
  const long long stride = of_k ? a.k_stride[1] : a.q_stride[1];
  copy_rows<kBlock, S::kRowTiles * 16, S::kKeyRow, kWide, 32>(
      of_k ? k : q,
      of_k ? head_rows(a.k, a.k_stride, chunk.b, chunk.first, hq)
           : head_rows(a.q, a.q_stride, chunk.b, chunk.first, hq),
      stride, r * kBlock, chunk.tokens, K, lane);
  cp_async_commit();
  Stored stored;
  if (warp == 0) stored.load(a, chunk, h, lane);
  const float sampled = warp == kBlocks ? sample(a, g, chunk, hq, h, lane) : 0.f;
  cp_async_wait<0>();
  __syncthreads();
  if (warp == 0) {  // which has half as much to multiply as others
    weigh(weights, a, stored, lane);
    __syncwarp();
    put_products<1>(products, weights, 0, lane);
  }

  float sum[kBlocks][2][4] = {}, alike = 0, squares = 0;
  KeySums keys = {};
#pragma unroll 1
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
  __syncthreads();
  const float scale = of_k ? 1.f : static_cast<float>(a.scale);
  float* const pairs = of_k ? errors : scores;
  const float beta = weights.beta[lane];
  const bool wide =
      __any_sync(0xffffffffu, !(beta >= 0 && beta <= 1) || !(fabsf(weights.gate[lane]) <= 1));
#pragma unroll
  for (int c = 0; c < kBlocks; c++) {
    if (c > r) continue;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int at = r * kBlock + lane / 4 + i / 2 % 2 * 8;
      const int first = c * kBlock + i / 4 * 8 + lane % 4 * 2;
      float out[2];
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int j = first + side;
        const float x = sum[c][i / 4][i % 4 + side], decay = products[at * kPairRow + j];
        const bool real = j + of_k <= at;
        const float key = real ? decay * x : 0.f;
        float weight = decay * weights.beta[j];
        if (wide) weight = bounded(weight);
        weight *= scale;
        out[side] = real ? (wide ? bounded(weighed(bounded(weight), x)) : weight * x) : 0.f;
        alike += key * key;
        if (real) keys.products += x * x;
        if (j == at) keys.lengths += x;
        squares += out[side] * out[side];
      }
      *reinterpret_cast<float2*>(pairs + at * kPairRow + first) = {out[0], out[1]};
    }
  }
  if (of_k) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      alike += __shfl_xor_sync(0xffffffffu, alike, step);
      squares += __shfl_xor_sync(0xffffffffu, squares, step);
      keys.products += __shfl_xor_sync(0xffffffffu, keys.products, step);
      keys.lengths += __shfl_xor_sync(0xffffffffu, keys.lengths, step);
    }
    const bool stays =
        wide || fabsf(weights.whole) > kLasting || seem_constant(sampled, chunk.tokens, lane);
    keys.errors = squares;
    if (lane == 0) key_sums[r] = keys;
    if (lane == 0)
      weights.strain[r] = stays ? 2.f : fmaxf(alike / kMostAlike<K>, squares / kMostErrors);
  }
  __syncthreads();
  const bool strained =
      !(weights.strain[0] + weights.strain[1] <= 1) || much_alike(key_sums, chunk.tokens);
  double* const exact = reinterpret_cast<double*>(errors);
  const bool exactly =
      __popc(__ballot_sync(0xffffffffu, weights.beta[lane] > kTurns)) > kMostTurns ||
      key_sums[0].errors + key_sums[1].errors > kMostGrowth;
  if (exactly) {
    put_errors<S::kRowTiles * 16, S::kKeyRow>(exact, k, products, weights, threadIdx.x);
    __syncthreads();
  }
  if (warp == 0) {
    if (exactly)
      invert_exactly(inverse, exact, lane);
    else
      invert(inverse, errors, lane);
  } else {
    put_pairs(to.scores, scores, threadIdx.x - 32, strained);
    const float* const from = reinterpret_cast<const float*>(&weights);
    constexpr int kCount = sizeof(ChunkWeights) / 4 - 3;
    if (threadIdx.x == 32) to.weights.strained = strained;
    for (int i = threadIdx.x - 32; i < kCount; i += kPrepareThreads - 32)
      reinterpret_cast<float*>(&to.weights)[i] = from[i];
  }
  __syncthreads();
  put_pairs(to.inverse, inverse, threadIdx.x, strained);
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
