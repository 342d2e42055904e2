// Chunks of 64 tokens on the way back: where they lie, how their numbers travel between global and
// shared memory, and products of neighbouring gates.
#pragma once
#include "factors.cuh"
#include "grad.cuh"

constexpr int kChunk = 64;  // tokens
constexpr int kBlock = 16;  // tokens of a block, the height of a tensor-core tile
constexpr int kBlocks = kChunk / kBlock;

// One number for all lanes, as the compiler then knows.
__device__ __forceinline__ int this_warp() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
}

template <bool kFirst, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

// What states are kept as between kernels.
template <class In>
struct Kept {
  using Type = float;
};
template <>
struct Kept<bfloat16_t> {
  using Type = bfloat16_t;
};

// States are kept for chunks in this order: those of a sequence follow each other, and chunks of
// packed sequences are counted as if each began at a multiple of 64 tokens.
__device__ __forceinline__ long long first_chunk(const CallArgs& a, long long n, long long start) {
  return a.cu_seqlens ? start / kChunk + n : n * ((a.T + kChunk - 1) / kChunk);
}
__device__ __forceinline__ long long count_chunks(const CallArgs& a) {
  return a.cu_seqlens ? a.T / kChunk + a.N : a.N * ((a.T + kChunk - 1) / kChunk);
}
// The sequence that a chunk is of, if it is of any.
__device__ __forceinline__ long long find_sequence(const CallArgs& a, long long chunk) {
  if (!a.cu_seqlens)
    return static_cast<unsigned>(chunk) / static_cast<unsigned>((a.T + kChunk - 1) / kChunk);
  long long low = 0, high = a.N;  // the last one that begins no later
  while (high - low > 1) {
    const long long middle = (low + high) / 2;
    if (first_chunk(a, middle, sequence(a, middle).start) <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// How rows go into shared memory: as they are given, each times its weight, or as states, which are
// rounded to nearest, not dithered: no product of a gradient has two factors that are states or
// tiles.
enum Rows { kGiven, kWeighed, kStates };

// kRows rows of kPadded numbers on their way into shared memory, each thread's part of them: zeros
// but for rows rows of cols numbers.
template <class In, int kRows, int kPadded, int kThreads, bool kWide>
struct HeldRows {
  static constexpr int kStep = kWide ? 16 / sizeof(In) : 1, kAcross = kPadded / kStep;
  static constexpr int kRuns = (kRows * kAcross + kThreads - 1) / kThreads;
  static constexpr bool kWhole = kRows * kAcross % kThreads == 0;
  Run<In, kStep> x[kRuns];

  __device__ __forceinline__ void load(const In* from, long long stride, int rows, int cols) {
    constexpr bool kColumn = kThreads % kAcross == 0;  // a thread keeps to its columns
    const In* source = from + threadIdx.x / kAcross * stride + threadIdx.x % kAcross * kStep;
    const long long down = kThreads / kAcross * stride;
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int e = threadIdx.x + i * kThreads, row = e / kAcross, at = e % kAcross * kStep;
      if (!kColumn) source = from + row * stride + at;
      x[i] = Run<In, kStep>{};
      if (row < rows && at < cols && (kWhole || row < kRows))
        x[i] = *reinterpret_cast<const Run<In, kStep>*>(source);
      if (kColumn) source += down;
    }
  }
  template <class F, int kLength, Rows kHow>
  __device__ __forceinline__ void store(typename F::Number* to, const float* weights) const {
    const unsigned first =
        dither_row(threadIdx.x / kAcross) ^ dither(threadIdx.x % kAcross * kStep) ^ kHalfStep;
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int e = threadIdx.x + i * kThreads, row = e / kAcross, at = e % kAcross * kStep;
      if (!kWhole && row >= kRows) continue;
      if constexpr (kHow != kWeighed && F::kCount == 1) {
        *reinterpret_cast<Run<In, kStep>*>(to + row * kLength + at) = x[i];
      } else {
        float y[kStep];
#pragma unroll
        for (int j = 0; j < kStep; j++) {
          y[j] = widen<float>(x[i].x[j]);
          if (kHow == kWeighed) y[j] = weighed(weights[row], y[j]);
        }
        F::template store<kLength, kHow == kWeighed, kHow != kStates>(
            to, row, at, y, first ^ dither_row(i * kThreads / kAcross));
      }
    }
  }
};

// A thread's share of the inner product of two matrices.
template <class Rows>
__device__ __forceinline__ float share_of_inner(const Rows& x, const Rows& y) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Rows::kRuns; i++)
#pragma unroll
    for (int j = 0; j < Rows::kStep; j++)
      sum += widen<float>(x.x[i].x[j]) * widen<float>(y.x[i].x[j]);
  return sum;
}

// Numbers into shared memory in one go.
template <class F, class In, int kRows, int kPadded, int kLength, int kThreads, bool kWide,
          Rows kHow = kGiven>
__device__ __forceinline__ void copy_rows(typename F::Number* to, const In* from, long long stride,
                                          int rows, int cols) {
  if constexpr (kWide && F::kCount == 1 && kThreads % (kPadded / 8) == 0) {
    constexpr int kAcross = kPadded / 8, kDown = kThreads / kAcross;
    const int at = threadIdx.x % kAcross * 8, first = threadIdx.x / kAcross;
    const In* source = from + first * stride + at;
    typename F::Number* const target = to + first * kLength + at;
#pragma unroll
    for (int row = 0; row < kRows; row += kDown) {
      const bool real = first + row < rows && at < cols;
      if (row + kDown <= kRows || first + row < kRows)
        cp_async<16>(target + row * kLength, source, real ? 16 : 0);
      source += kDown * stride;
    }
  } else if constexpr (kWide && F::kCount == 1) {
    constexpr int kAcross = kPadded / 8;
#pragma unroll 4
    for (int e = threadIdx.x; e < kRows * kAcross; e += kThreads) {
      const int row = e / kAcross, at = e % kAcross * 8;
      const bool real = row < rows && at < cols;
      cp_async<16>(to + row * kLength + at, from + row * stride + at, real ? 16 : 0);
    }
  } else {
    HeldRows<In, kRows, kPadded, kThreads, kWide> held;
    held.load(from, stride, rows, cols);
    held.template store<F, kLength, kHow>(to, nullptr);
  }
}

template <class Out>
__device__ __forceinline__ unsigned two(float low, float high) {
  return Narrow<Out>::from(low).bits | static_cast<unsigned>(Narrow<Out>::from(high).bits) << 16;
}

// Two neighbouring tiles of a row, as mma leaves them, into global memory: numbers first, first + 1
// of both, from column col on. By all lanes of a warp, of which those with real write.
template <class Out, bool kWide>
__device__ __forceinline__ void put_pair(Out* row, int col, int cols, bool real,
                                         const float (&x0)[4], const float (&x1)[4], int first,
                                         int lane) {
  if constexpr (kWide && sizeof(Out) == 2) {  // neighbours swap, for four numbers each of one tile
    const unsigned low = two<Out>(x0[first], x0[first + 1]);
    const unsigned high = two<Out>(x1[first], x1[first + 1]);
    const unsigned got = __shfl_xor_sync(0xffffffffu, lane % 2 ? low : high, 1);
    const int at = col + lane % 2 * 8 + lane % 4 / 2 * 4;
    if (real && at < cols) put_two(row + at, lane % 2 ? got : low, lane % 2 ? high : got);
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const float (&x)[4] = tile ? x1 : x0;
      const int at = col + tile * 8 + lane % 4 * 2;
      if constexpr (kWide) {
        if (real && at < cols)
          put_two(row + at, __float_as_uint(x[first]), __float_as_uint(x[first + 1]));
      } else {
        if (real && at < cols) row[at] = Narrow<Out>::from(x[first]);
        if (real && at + 1 < cols) row[at + 1] = Narrow<Out>::from(x[first + 1]);
      }
    }
  }
}

constexpr double kLift = 18446744073709551616.;  // 2^64

// What tokens of a chunk weigh in the state at its end, or in its gradient at the start. Gates are
// multiplied in double, since equal ones make equal roundings, which would add up over chunks.
// Where all weights are tiny they are kept 2^64 times as large, so that products with them are no
// denormal numbers.
struct ChunkWeights {
  float x[kChunk];
  float whole, rest;  // all gates, as a sum
  float lower;        // what a sum over the chunk is to be multiplied with
  int padding;

  // By one warp; lane l brings gates and factors of tokens 2 l and 2 l + 1.
  __device__ __forceinline__ void fill(int lane, const double (&gate)[2], const double (&factor)[2],
                                       bool back) {
    double head = bounded(gate[0] * gate[1]), tail = head;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, head, step);
      const double after = __shfl_down_sync(0xffffffffu, tail, step);
      if (lane >= step) head = bounded(before * head);
      if (lane + step < 32) tail = bounded(tail * after);
    }
    double before = __shfl_up_sync(0xffffffffu, head, 1);
    double after = __shfl_down_sync(0xffffffffu, tail, 1);
    if (lane == 0) before = 1;
    if (lane == 31) after = 1;
    double w0 = back ? bounded(before * gate[0]) : bounded(after * gate[1]);
    double w1 = back ? head : after;
    w0 = bounded(w0 * factor[0]), w1 = bounded(w1 * factor[1]);
    double all = __shfl_sync(0xffffffffu, head, 31);
    const auto tiny = [](double w) { return fabs(w) < 1 / kLift; };
    const bool lifted = __all_sync(0xffffffffu, tiny(w0) && tiny(w1) && tiny(all));
    if (lifted) w0 *= kLift, w1 *= kLift, all *= kLift;
    x[2 * lane] = static_cast<float>(w0);
    x[2 * lane + 1] = static_cast<float>(w1);
    if (lane == 0) {
      whole = static_cast<float>(all);
      rest = static_cast<float>(all - whole);
      lower = lifted ? static_cast<float>(1 / kLift) : 1.f;
    }
  }
};
