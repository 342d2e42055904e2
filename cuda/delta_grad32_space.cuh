// What the three kernels of delta_grad32.cu leave in global memory for each other, and what they
// share.
#pragma once
#include "bounded.cuh"
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
  float* misses;  // rows of e = v - k^T R, in blocks of delta_grad32_factors.cuh, as are
  float* states;  // before each chunk and
  float* late;    // gradients of the states after each chunk
  long long slots;
};

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

// kRows of the rows that begin at `from` into shared memory, from row `row0` on, by kThreads
// threads: kCols numbers a row, of which `cols` are real, as are `rows` rows.
template <int kRows, int kCols, int kRow, bool kWide, int kThreads>
__device__ __forceinline__ void copy_rows(float* to, const float* from, long long stride, int row0,
                                          int rows, int cols, int thread) {
  constexpr int kStep = kWide ? 4 : 1, kSteps = kCols / kStep, kCount = kRows * kSteps;
  constexpr int kApart = kThreads % kSteps == 0 ? kThreads / kSteps : 0;  // rows, each turn
  const float* next = from + (row0 + thread / kSteps) * stride + thread % kSteps * kStep;
  to += row0 * kRow;
#pragma unroll(kWide ? 4 : 1)
  for (int turn = 0; turn < (kCount + kThreads - 1) / kThreads; turn++) {
    const int e = thread + turn * kThreads;
    if (kCount % kThreads != 0 && e >= kCount) break;
    const int row = kApart > 0 ? thread / kSteps + turn * kApart : e / kSteps;
    const int at = (kApart > 0 ? thread : e) % kSteps * kStep;
    if (kApart == 0) next = from + (row0 + row) * stride + at;
    const bool real = row0 + row < rows && (cols >= kCols || at < cols);
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

// Gate and beta of a token a lane as they are stored; past the last token gate 1, beta 0.
struct Stored {
  Scalar<float> gate, beta;
  bool real;

  __device__ __forceinline__ void load(const CallArgs& a, const SlotChunk& chunk, long long h,
                                       int lane) {
    real = lane < chunk.tokens;
    if (!real) return;
    const long long t = chunk.first + lane;
    gate.load(a.gate, chunk.b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
              a.gate_kind);
    beta.load(a.beta, chunk.b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2],
              a.beta_kind);
  }
};

// Weights of a chunk by one warp, a token a lane; products of all gates are made in double, since
// equal gates make equal roundings, and once more where they pass even its range.
__device__ __forceinline__ void weigh(ChunkWeights& to, const CallArgs& a, const Stored& stored,
                                      int lane) {
  const double gate = stored.real ? nan_if_infinite(stored.gate.value<double>(a.gate_kind)) : 1;
  const float beta = stored.real ? nan_if_infinite(stored.beta.value<float>(a.beta_kind)) : 0;
  double head, tail;  // of gates up to, and from, this lane's
#pragma unroll 1
  for (bool wild = false;; wild = true) {
    head = tail = gate;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, head, step);
      const double after = __shfl_down_sync(0xffffffffu, tail, step);
      if (lane >= step) head *= before;
      if (lane + step < 32) tail *= after;
      if (wild) head = bounded(head), tail = bounded(tail);
    }
    const bool finite = head - head == 0 && tail - tail == 0;
    if (wild || __all_sync(0xffffffffu, finite)) break;
  }
  const double after = __shfl_down_sync(0xffffffffu, tail, 1);
  to.from_start[lane] = bounded(static_cast<float>(head));
  to.to_end[lane] = lane == 31 ? 1.f : bounded(static_cast<float>(after));
  to.beta[lane] = beta;
  to.gate[lane] = static_cast<float>(gate);
  if (lane == 31) to.whole = bounded(static_cast<float>(head));
}

// D_ij = gate_{j+1} ... gate_i for j <= i, else 0, rows kPairRow apart: each of kWarps has as many
// rows, a lane a column.
template <int kWarps>
__device__ __forceinline__ void put_products(float* to, const ChunkWeights& weights, int warp,
                                             int lane) {
  const int first = warp * (kChunk / kWarps);
  float d = lane <= first ? weights.gate[lane] : 1.f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float more = __shfl_down_sync(0xffffffffu, d, step);
    if (lane + step < 32) d = bounded(d * more);
  }
  d = __shfl_down_sync(0xffffffffu, d, 1);
  if (lane >= first) d = lane == first;
  to[first * kPairRow + lane] = d;
#pragma unroll 1
  for (int i = first + 1; i < first + kChunk / kWarps; i++) {
    d = i > lane ? bounded(d * weights.gate[i]) : (i == lane ? 1.f : 0.f);
    to[i * kPairRow + lane] = d;
  }
}
