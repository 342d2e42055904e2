// What the three kernels of delta_grad32.cu leave in global memory for each other, and what they
// share.
#pragma once
#include "grad.cuh"
#include "slots.cuh"
#include "split_rows.cuh"

constexpr int kChunk = 32;  // tokens
constexpr int kBlock = 16;  // tokens of a block
constexpr int kBlocks = kChunk / kBlock;
constexpr int kPad = 4;  // floats after each row in shared memory: rows in different banks
constexpr int kPairRow = kChunk + kPad;

struct ChunkWeights {
  float from_start[kChunk];  // gates 0 to t
  float to_end[kChunk];      // gates t + 1 to 31
  float beta[kChunk], gate[kChunk];
  float whole;            // all gates
  int strained;           // whether planes have too few digits for the walks
  float strain[kBlocks];  // by blocks of tokens
};

// Of one chunk of one head, before any state is known. The inverse is that of I + A, A_ij = D_ij
// beta_j k_i . k_j for j < i. Rows are in planes, as split_rows.cuh has them, where the chunk is
// not strained; the block of 16 x 16 above the diagonal is left out.
struct alignas(16) Prepared {
  float inverse[kChunk * kChunk];
  float scores[kChunk * kChunk];  // scale D_ij beta_j q_i . k_j
  ChunkWeights weights;
};

// Entries lie slot by slot and head by head.
struct SpaceArgs {
  Prepared* prepared;
  float* misses;  // rows of e = v - k^T R, padded
  float* states;  // before each chunk, in blocks of kStateBlock
  float* late;    // gradients of the states after each chunk, likewise
  long long slots;
};

// 16 columns and 16 rows of a state in planes, high and low. Each plane has 4 tiles of 8 x 8 as mma
// leaves a sum, a word a lane: columns 0 to 7, 8 to 15 of rows 0 to 7, then those of rows 8 to 15.
// Blocks lie column by column.
constexpr int kStateBlock = 256;  // floats

__device__ __forceinline__ void put_state(float* block, const Split& x, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    block[i * 32 + lane] = __uint_as_float(x.high[i]);
    block[128 + i * 32 + lane] = __uint_as_float(x.low[i]);
  }
}
// As a right factor, with sums over columns.
__device__ __forceinline__ Split load_state(const float* block, int lane) {
  Split x;
  ldmatrix_x4<true>(x.high, block + 4 * lane);
  ldmatrix_x4<true>(x.low, block + 128 + 4 * lane);
  return x;
}

using SlotChunk = ChunkInSlot<kChunk>;

template <int K, int V>
struct HeadShape {
  static constexpr int kRowTiles = (K + 15) / 16, kKeys = kRowTiles * 16, kKeyRow = kKeys + kPad;
  static constexpr int kValueTiles = (V + 15) / 16, kValues = kValueTiles * 16;
  static constexpr int kState = kKeys * kValues;
};

// Where the rows of one head begin, of an array with strides over (B, T, heads).
__device__ __forceinline__ const float* head_rows(const void* x, const long long (&stride)[3],
                                                  long long b, long long t, long long h) {
  return static_cast<const float*>(x) + b * stride[0] + t * stride[1] + h * stride[2];
}

// Rows into shared memory by kThreads threads: kCols numbers a row, of which `rows` and `cols` are
// real.
template <int kRows, int kCols, int kRow, bool kWide, int kThreads>
__device__ __forceinline__ void copy_rows(float* to, const float* from, long long stride, int rows,
                                          int cols, int thread) {
  constexpr int kStep = kWide ? 4 : 1, kSteps = kCols / kStep, kCount = kRows * kSteps;
  constexpr int kApart = kThreads % kSteps == 0 ? kThreads / kSteps : 0;  // rows, each turn
  const float* next = from + thread / kSteps * stride + thread % kSteps * kStep;
#pragma unroll(kWide ? 4 : 1)
  for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; turn++) {
    const int e = thread + turn * kThreads;
    if (kCount % kThreads != 0 && e >= kCount) break;
    const int row = kApart > 0 ? thread / kSteps + turn * kApart : e / kSteps;
    const int at = (kApart > 0 ? thread : e) % kSteps * kStep;
    if (kApart == 0) next = from + row * stride + at;
    const bool real = row < rows && (cols >= kCols || at < cols);
    cp_async<4 * kStep>(to + row * kRow + at, real ? next : from, real ? 4 * kStep : 0);
    next += kApart * stride;
  }
}

// Pairs of tokens of Prepared into shared memory, but the block above the diagonal.
template <int kThreads>
__device__ __forceinline__ void copy_pairs(float* to, const float* from, int thread) {
  constexpr int kSteps = kChunk / 4, kCount = kChunk * kSteps;
#pragma unroll 4
  for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; turn++) {
    const int e = thread + turn * kThreads, row = e / kSteps, at = e % kSteps * 4;
    if (e < kCount && (row >= kBlock || at < kBlock))
      cp_async<16>(to + row * kPairRow + at, from + 4 * e);
  }
}

// A product that overflows is kept at the largest number of bfloat16, as in decay32.cuh.
__device__ __forceinline__ float bounded(float x) {
  return x > 3.3895314e38f ? 3.3895314e38f : (x < -3.3895314e38f ? -3.3895314e38f : x);
}

// Weights of a chunk by one warp, a token a lane; products of all gates are made in double, since
// equal gates make equal roundings. Past the last token: gate 1, beta 0.
__device__ __forceinline__ void weigh(ChunkWeights& to, const CallArgs& a, const SlotChunk& chunk,
                                      long long h, int lane) {
  double gate = 1;
  float beta = 0;
  if (lane < chunk.tokens) {
    const long long t = chunk.first + lane;
    Scalar<float> x;
    x.load(a.gate, chunk.b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
           a.gate_kind);
    gate = x.value<double>(a.gate_kind);
    x.load(a.beta, chunk.b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2],
           a.beta_kind);
    beta = x.value<float>(a.beta_kind);
  }
  double head = gate, tail = gate;  // of gates up to, and from, this lane's
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, head, step);
    const double after = __shfl_down_sync(0xffffffffu, tail, step);
    if (lane >= step) head *= before;
    if (lane + step < 32) tail *= after;
  }
  const double after = __shfl_down_sync(0xffffffffu, tail, 1);
  to.from_start[lane] = bounded(static_cast<float>(head));
  to.to_end[lane] = lane == 31 ? 1.f : bounded(static_cast<float>(after));
  to.beta[lane] = beta;
  to.gate[lane] = static_cast<float>(gate);
  if (lane == 31) to.whole = bounded(static_cast<float>(head));
}

// D_ij = gate_{j+1} ... gate_i for j <= i, else 0, rows kPairRow apart, by one warp: a column a
// lane.
__device__ __forceinline__ void put_products(float* to, const ChunkWeights& weights, int lane) {
  float d = 0;
  for (int i = 0; i < kChunk; i++) {
    d = i > lane ? bounded(d * weights.gate[i]) : (i == lane ? 1.f : 0.f);
    to[i * kPairRow + lane] = d;
  }
}
