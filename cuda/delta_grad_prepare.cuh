// Kernels that make, of all chunks at once, what the walks of delta_grad.cu need before any state
// is known; and rows of q and k of unit length.
#pragma once
#include "delta_grad_space.cuh"

constexpr int kPrepareThreads = 32 * kInverters;

template <int K>
struct PrepareShape {
  static constexpr int kRowTiles = (K + 15) / 16, kKeyRow = kRowTiles * 16 + kPad;
  static constexpr int kKeys = kChunk * kKeyRow;
  static constexpr int kRows = 4 * kKeys, kBench = static_cast<int>(sizeof(Workbench));  // bytes
  static constexpr int kBytes =
      (kRows > kBench ? kRows : kBench) + static_cast<int>(sizeof(Decay)) + 4 * kInverters;
};

// Row r of the blocks of a chunk, as in inverse.cuh, with one copy of the code for all rows: beta
// is in the decays of columns. Parts to the right of the diagonal are left out.
template <class S>
struct PreparedRow {
  int r, lane;
  bool wild;                                   // whether products of gates may overflow
  float kk[kBlocks][2][4], qk[kBlocks][2][4];  // zeros at first

  __device__ __forceinline__ void multiply_rows(const unsigned short* q, const unsigned short* k) {
#pragma unroll 1
    for (int i = 0; i < S::kRowTiles; i++) {
      unsigned qt[4], kt[4];
      load_left(qt, q + r * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
      load_left(kt, k + r * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
#pragma unroll
      for (int c = 0; c < kBlocks; c++) {
        if (c > r) continue;
        unsigned b[4];
        load_right_transposed(b, k + c * kBlock * S::kKeyRow + i * 16, S::kKeyRow, lane);
        multiply(kk[c], kt, b);
        multiply(qk[c], qt, b);
      }
    }
  }

  // Scores with their decays are done; kk becomes A, of which blocks go to the bench. Returns this
  // lane's part of the sum of squares of A.
  __device__ __forceinline__ float weigh(Prepared& to, Workbench& bench, const Decay& decay) {
    float squares = 0;
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      if (c > r) continue;
      if (__builtin_expect(wild, 0))
#pragma unroll
        for (int i = 0; i < 8; i++) {
          qk[c][i / 4][i % 4] = nan_if_infinite(qk[c][i / 4][i % 4]);
          kk[c][i / 4][i % 4] = nan_if_infinite(kk[c][i / 4][i % 4]);
        }
      float w[2][4];
      decays_of_block(w, decay, r, c, lane);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int row = lane / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float &score = qk[c][i / 4][i % 4], &x = kk[c][i / 4][i % 4];
        score = c < r || col <= row ? w[i / 4][i % 4] * score : 0.f;
        x = c < r || col < row ? w[i / 4][i % 4] * x : 0.f;
        squares += x * x;
      }
      if (__builtin_expect(wild, 0))
#pragma unroll
        for (int i = 0; i < 8; i++) {
          qk[c][i / 4][i % 4] = bounded(qk[c][i / 4][i % 4]);
          kk[c][i / 4][i % 4] = bounded(kk[c][i / 4][i % 4]);
        }
      unsigned packed[4], right[4];
      pack_left(packed, qk[c]);
      left_as_right(right, packed);
      to.scores[lower(r, c)][lane] = {right[0], right[1], right[2], right[3]};
      if (c < r) {
        Split a;
        a.set(kk[c]);
        put(bench, c, a);
      } else {
#pragma unroll
        for (int i = 0; i < 8; i += 2)
          *reinterpret_cast<float2*>(
              &bench.diagonal[r][lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2]) = {
              kk[c][i / 4][i % 4], kk[c][i / 4][i % 4 + 1]};
      }
    }
    return squares;
  }

  // (I + A)^-1 of the block on the diagonal, in its place: a column a lane, row by row.
  __device__ __forceinline__ void invert_diagonal(Workbench& bench, Split& inverse) const {
    auto& block = bench.diagonal[r];
    __syncwarp();
    if (wild)
      invert_wild(block);
    else
      invert(block);
    __syncwarp();
    float t[2][4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 two = *reinterpret_cast<const float2*>(
          &block[lane / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane % 4 * 2]);
      t[i / 4][i % 4] = two.x, t[i / 4][i % 4 + 1] = two.y;
    }
    inverse.set(t);
    put(bench, r, inverse);
  }

  // From the diagonal to the left: T_rc = -(sum over c < m <= r of T_rm A_mc) T_cc.
  __device__ __forceinline__ void complete(Split (&inverse)[kBlocks],
                                           const Workbench& bench) const {
#pragma unroll
    for (int c = kBlocks - 2; c >= 0; c--) {
      if (c >= r) continue;
      float sum[2][4] = {}, t[2][4] = {};
#pragma unroll
      for (int m = c + 1; m < kBlocks; m++)
        if (m <= r) add(sum, inverse[m], bench, lower(m, c));
      Split left;
      left.set(sum);
      add(t, left, bench, lower(c, c));
#pragma unroll
      for (int i = 0; i < 8; i++) t[i / 4][i % 4] = -t[i / 4][i % 4];
      inverse[c].set(t);
    }
  }

  __device__ __forceinline__ void put(Prepared& to, const Split (&inverse)[kBlocks]) const {
#pragma unroll
    for (int c = 0; c < kBlocks; c++) {
      if (c > r) continue;
      const int at = lower(r, c);
      unsigned high[4], low[4];
      left_as_right(high, inverse[c].high);
      left_as_right(low, inverse[c].low);
      to.transposed[0][at][lane] = left_as_right_transposed(inverse[c].high);
      to.transposed[1][at][lane] = left_as_right_transposed(inverse[c].low);
      to.inverse[0][at][lane] = {high[0], high[1], high[2], high[3]};
      to.inverse[1][at][lane] = {low[0], low[1], low[2], low[3]};
    }
  }

 private:
  using Block = float[kBlock][kDiagonalRow];

  __device__ __forceinline__ void invert(Block& block) const {
    float x[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i++) {
      float4 a[4];
#pragma unroll
      for (int j = 0; j < i; j += 4) a[j / 4] = *reinterpret_cast<const float4*>(&block[i][j]);
      x[i] = lane % 16 == i ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; j++) {
        const float4& four = a[j / 4];
        x[i] -=
            (j % 4 == 0 ? four.x : (j % 4 == 1 ? four.y : (j % 4 == 2 ? four.z : four.w))) * x[j];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kBlock; i++)
      if (i / 8 == lane / 16) block[i][lane % 16] = x[i];
  }
  // The same, with every step kept from overflow.
  __device__ __forceinline__ void invert_wild(Block& block) const {
#pragma unroll 1
    for (int i = 0; i < kBlock; i++) {
      float x = lane % 16 == i ? 1.f : 0.f;
#pragma unroll 1
      for (int j = 0; j < i; j++) x = tame(x - tame(block[i][j] * block[j][lane % 16]));
      __syncwarp();
      if (lane < 16) block[i][lane] = x;
      __syncwarp();
    }
  }

  __device__ __forceinline__ void put(Workbench& bench, int c, const Split& x) const {
    unsigned b[4];
    left_as_right(b, x.high);
    bench.high[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
    left_as_right(b, x.low);
    bench.low[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
  }
  __device__ __forceinline__ void add(float (&sum)[2][4], const Split& x, const Workbench& bench,
                                      int block) const {
    const uint4 h = bench.high[block][lane], l = bench.low[block][lane];
    const unsigned high[4] = {h.x, h.y, h.z, h.w}, low[4] = {l.x, l.y, l.z, l.w};
    multiply(sum, x.low, high);
    multiply(sum, x.high, low);
    multiply(sum, x.high, high);
    if (__builtin_expect(wild, 0))
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = tame(sum[i / 4][i % 4]);
  }
};

// grid: slots * H. block: kPrepareThreads.
template <int K, bool kWide>
__global__ void __launch_bounds__(kPrepareThreads, 5)
    delta_grad_prepare(const CallArgs a, const SpaceArgs space) {
  using S = PrepareShape<K>;
  static_assert(!kWide || K % 8 == 0, "rows of whole vectors");
  DYNAMIC_SHARED(unsigned short, shared);
  unsigned short *const q = shared, *const k = q + S::kKeys;
  Workbench& bench = *reinterpret_cast<Workbench*>(shared);  // in the place of rows
  Decay& decay =
      *reinterpret_cast<Decay*>(shared + (S::kBytes - 4 * kInverters - sizeof(Decay)) / 2);
  float* const strain = reinterpret_cast<float*>(&decay + 1);
  if (K % 16 != 0)  // padding
    for (int i = threadIdx.x; i < 2 * S::kKeys; i += kPrepareThreads) shared[i] = 0;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  __syncthreads();

  const unsigned item = blockIdx.x, heads = a.H, group = a.group;
  const SlotChunk chunk(a, item / heads);
  if (chunk.tokens == 0) return;
  const long long h = item % heads, hq = item % heads / group;
  const long long t = chunk.first + warp % 2 * kCopyRows;
  const int rows = chunk.tokens - warp % 2 * kCopyRows;
  const bool of_k = warp / 2;
  const unsigned short* const from = of_k ? head_rows(a.k, a.k_stride, chunk.b, t, hq)
                                          : head_rows(a.q, a.q_stride, chunk.b, t, hq);
  copy_rows<K, S::kKeyRow, kWide>((of_k ? k : q) + warp % 2 * kCopyRows * S::kKeyRow, from,
                                  of_k ? a.k_stride[1] : a.q_stride[1], rows, K, lane);
  cp_async_commit();
  Prepared& to = space.prepared[item];
  if (warp == 0) {
    float gate[2], beta[2];
    load_gates(gate, beta, a, chunk, h, lane);
    decay.fill(lane, gate[0], gate[1], beta[0], beta[1]);
    __syncwarp();
    decay.fill_diagonal(lane);
  }
  cp_async_wait<0>();
  __syncthreads();
  PreparedRow<S> row = {warp, lane, decay.wild != 0};
  row.multiply_rows(q, k);
  __syncthreads();
  float squares = row.weigh(to, bench, decay);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (lane == 0) strain[warp] = squares;
  // NaN stays NaN: it is not kept from overflow
  row.wild = squares > kMostGrowth || (row.wild && squares == squares);
  Split inverse[kBlocks], own;
  row.invert_diagonal(bench, own);
#pragma unroll
  for (int c = 0; c < kBlocks; c++)
    if (c == warp) inverse[c] = own;
  __syncthreads();
  const float sum = strain[0] + strain[1] + strain[2] + strain[3];
  row.wild = sum > kMostGrowth || (decay.wild && sum == sum);
  row.complete(inverse, bench);
  row.put(to, inverse);
  if (threadIdx.x < kChunk) {
    to.weights.from_start[threadIdx.x] = decay.from_start[threadIdx.x];
    to.weights.to_end[threadIdx.x] = decay.to_end[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    to.weights.whole = decay.whole;
    to.weights.strained = decay.wild || sum > 2.f * kChunk;
  }
}

// Rows of q and k of unit length, (B, T, Hq, K), contiguous. grid: any number of blocks; a warp
// takes one row at a time.
template <int K>
__global__ void __launch_bounds__(256, 1)
    delta_grad_units(const CallArgs a, const GradArgs g, unsigned short* q, unsigned short* k) {
  constexpr int kEach = (K + 31) / 32;
  const int lane = threadIdx.x % 32;
  const long long heads = a.H / a.group, rows = g.B * a.T * heads;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  long long item = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  for (; item < 2 * rows; item += warps) {
    const bool of_k = item >= rows;
    const long long row = of_k ? item - rows : item;
    const long long b = row / heads / a.T, t = row / heads % a.T, h = row % heads;
    const unsigned short* const from =
        of_k ? head_rows(a.k, a.k_stride, b, t, h) : head_rows(a.q, a.q_stride, b, t, h);
    float x[kEach], squares = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      x[i] = lane + 32 * i < K ? bfloat16_bits_to_float(from[lane + 32 * i]) : 0.f;
      squares += x[i] * x[i];
    }
#pragma unroll
    for (int hop = 1; hop < 32; hop *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, hop);
    const float inverse = 1.f / sqrtf(squares + 1e-6f);
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (lane + 32 * i < K)
        (of_k ? k : q)[row * K + lane + 32 * i] = float_to_bfloat16_bits(inverse * x[i]);
  }
}
