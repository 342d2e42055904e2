// What the roles of linear32.cu share, and those that feed: copies of q, k and v, and decays.
#pragma once
#include "call.cuh"
#include "decay32.cuh"
#include "factors.cuh"

struct PieceArgs {
  float* states;         // (pieces, N, H, K, V): after each piece from zero, then before each piece
  double* decays;        // (pieces, N, H)
  long long piece_size;  // tokens, whole chunks
  int pieces;
  int padding;
};

// kOutRows and kOutCols: what one warp makes of a chunk's outputs. kStateRows and kStateCols: what
// one warp keeps of the state. kStages chunks lie in shared memory or are on their way there. All
// rows of q, k, v and y begin at multiples of kWide numbers and hold whole vectors of kWide.
template <class In_, int K_, int V_, int kCols_, int kSteps_, int kStages_, int kOutRows_,
          int kOutCols_, int kStateRows_, int kStateCols_, int kCopyWarps_, int kDecayWarps_,
          int kProducts_, int kWide_, bool kOutput_>
struct Shape {
  using In = In_;
  static constexpr int K = K_, V = V_, kCols = kCols_, kSteps = kSteps_, kStages = kStages_;
  static constexpr int kOutRows = kOutRows_, kOutCols = kOutCols_;
  static constexpr int kStateRows = kStateRows_, kStateCols = kStateCols_;
  static constexpr int kCopyWarps = kCopyWarps_, kDecayWarps = kDecayWarps_;
  static constexpr int kProducts = kProducts_, kWide = kWide_;
  static constexpr bool kOutput = kOutput_;

  static constexpr int kRealCols = kCols < V ? kCols : V;
  static constexpr int kColBlocks = (V + kCols - 1) / kCols;
  static constexpr int kKeyTiles = (K + 15) / 16;
  static constexpr int kKeyRow = (K + 31) / 32 * 32, kValueRow = (kCols + 31) / 32 * 32;
  static constexpr int kRowParts = kChunk / kOutRows;
  static constexpr int kColParts = (kRealCols + kOutCols - 1) / kOutCols;
  static constexpr int kOutWarps = kOutput ? kSteps * kRowParts * kColParts : 0;
  static constexpr int kStateRowParts = (K + kStateRows - 1) / kStateRows;
  static constexpr int kStateColParts = (kRealCols + kStateCols - 1) / kStateCols;
  static constexpr int kStateWarps = kStateRowParts * kStateColParts;
  static constexpr int kThreads = 32 * (kOutWarps + kStateWarps + kCopyWarps + kDecayWarps);
  static constexpr int kStateSlots = 2 * kSteps, kGateSlots = 3 * kSteps;
  static constexpr int kStateSize = kStateColParts * kStateCols * kKeyRow;
  static constexpr int kQuery = kOutput ? kChunk * kKeyRow : 0;  // numbers, like the next one
  static constexpr int kStage = kQuery + kChunk * (kKeyRow + kValueRow);
  static constexpr int kStageFloats = kStage * static_cast<int>(sizeof(In)) / 4;  // their room
  static constexpr int kFloats = kStages * kStageFloats + (kOutput ? kStateSlots * kStateSize : 0);
  static constexpr int kAhead = kStages - (3 * kSteps - 1);  // chunks copied earlier than they must
  static constexpr bool kPadded = K % 32 != 0 || kRealCols % 32 != 0;

  static_assert(kWide == 1 || (kWide * sizeof(In) == 16 && K % kWide == 0 && V % kWide == 0),
                "rows of whole vectors");
  static_assert(kOutRows == 16 || kOutRows == 32, "one or two blocks of a chunk");
  static_assert(kOutCols % 8 == 0 && kStateRows % 8 == 0 && kStateCols % 16 == 0, "whole tiles");
  static_assert((kColParts == 1 || kOutCols % 16 == 0) &&
                    (kStateRowParts == 1 || kStateRows % 16 == 0),
                "tiles are read in pairs");
  static_assert(kColParts * kOutCols <= kStateColParts * kStateCols, "outputs need states");
  static_assert(kStateColParts * kStateCols <= kValueRow, "values are padded with zeros so far");
  static_assert(kStateRowParts * kStateRows <= kKeyRow, "keys are padded with zeros so far");
  static_assert(kDecayWarps <= kSteps, "each writes gates of its own, whatever the others do");
  static_assert(kAhead >= 0, "chunks of outputs, states and copies lie side by side");
};

// What a block works on.
struct Item {
  long long b, h, n, nh, start, stop;  // the first token of the piece, and one past its last
  long long y;                         // where the first output lies
  int piece, chunks, col0, cols, tokens, padding;
};

// Shared memory of a block. The item lies there too: registers are scarce, and its numbers are
// wanted before and after the chunks.
template <class S>
struct Shared {
  float* rows;

  using In = typename S::In;

  __device__ __forceinline__ In* queries(int c) const {
    return reinterpret_cast<In*>(rows) + c % S::kStages * S::kStage;
  }
  __device__ __forceinline__ In* keys(int c) const { return queries(c) + S::kQuery; }
  __device__ __forceinline__ In* values(int c) const { return keys(c) + kChunk * S::kKeyRow; }
  __device__ __forceinline__ float* state_before(int c) const {
    return rows + S::kStages * S::kStageFloats + c % S::kStateSlots * S::kStateSize;
  }
  __device__ __forceinline__ Decay& decay(int c) const {
    return reinterpret_cast<Decay*>(rows + S::kFloats)[c % S::kStages];
  }
  __device__ __forceinline__ float* gates(int c) const {
    return reinterpret_cast<float*>(reinterpret_cast<Decay*>(rows + S::kFloats) + S::kStages) +
           c % S::kGateSlots * (2 * kChunk);
  }
  __device__ __forceinline__ Item& item() const {
    return *reinterpret_cast<Item*>(gates(0) + S::kGateSlots * 2 * kChunk);
  }

  static constexpr int kBytes = 4 * (S::kFloats + S::kGateSlots * 2 * kChunk) +
                                S::kStages * static_cast<int>(sizeof(Decay)) +
                                static_cast<int>(sizeof(Item));
};

template <class S>
__device__ __forceinline__ Item find_item(const CallArgs& a, const PieceArgs& pieces) {
  Item x;
  const int last_piece = pieces.pieces - (S::kOutput ? 0 : 1);
  const long long item = blockIdx.x;
  x.col0 = static_cast<int>(item % S::kColBlocks) * S::kCols;
  x.cols = min(S::kCols, S::V - x.col0);
  x.piece = static_cast<int>(item / S::kColBlocks % last_piece);
  x.nh = item / S::kColBlocks / last_piece;
  x.n = x.nh / a.H;
  x.h = x.nh % a.H;
  const Sequence seq = sequence(a, x.n);
  x.b = seq.b;
  x.start = min(seq.start + x.piece * pieces.piece_size, seq.stop);
  x.stop = min(x.start + pieces.piece_size, seq.stop);
  x.y = x.b * a.y_stride[0] + x.start * a.y_stride[1] + x.h * a.y_stride[2] + x.col0;
  x.tokens = static_cast<int>(x.stop - x.start);
  x.chunks = (x.tokens + kChunk - 1) / kChunk;
  return x;
}

template <class S>
__device__ __forceinline__ int steps(int chunks) {
  return (chunks + S::kSteps - 1) / S::kSteps;
}

// Gates or betas of an item, and their way through shared memory. A float16 number travels in the
// four bytes that it lies in, or in the first two of them: copies are no shorter.
template <class In>
struct Scalars32 {
  const void* base;
  long long first, stride;  // in numbers
  int kind;

  __device__ __forceinline__ bool is_half() const {
    return sizeof(In) == 2 && (kind == kAsInputs || kind == kLogOfInputs);
  }

  __device__ __forceinline__ void fetch(float* to, int t) const {
    const long long at = first + t * stride;
    if (is_half()) {
      const auto from = reinterpret_cast<const char*>(static_cast<const half_t*>(base) + at);
      cp_async<4>(to, from - upper(t), 2 + upper(t));
    } else if (kind != kAbsent) {
      cp_async<4>(to, static_cast<const float*>(base) + at);
    }
  }

  __device__ __forceinline__ double value(const float* from, int t) const {
    if (kind == kAbsent) return 1;
    const double x = is_half() ? half_bits_to_float(static_cast<unsigned short>(
                                     __float_as_uint(*from) >> upper(t) * 8))
                               : *from;
    return kind == kLogOfInputs || kind == kLogOfFloat ? exp(x) : x;
  }

 private:
  // 2 where a float16 number lies in the upper half of four bytes, otherwise 0.
  __device__ __forceinline__ int upper(int t) const {
    return static_cast<int>(reinterpret_cast<unsigned long long>(base) + 2 * (first + t * stride)) &
           2;
  }
};

// Decays by warp `warp` of those that make them: of every so many chunks, one token a lane. Each
// gate is a read of its own, far from the next one: they are fetched two steps before their use.
template <class S>
__device__ __forceinline__ void make_decays(const CallArgs& a, const Shared<S>& shared, int warp,
                                            int lane) {
  const Item& item = shared.item();
  const int tokens = item.tokens, chunks = item.chunks;
  using In = typename S::In;
  const Scalars32<In> gates{
      a.gate, item.b * a.gate_stride[0] + item.start * a.gate_stride[1] + item.h * a.gate_stride[2],
      a.gate_stride[1], a.gate_kind};
  const Scalars32<In> betas{
      a.beta, item.b * a.beta_stride[0] + item.start * a.beta_stride[1] + item.h * a.beta_stride[2],
      a.beta_stride[1], a.beta_kind};
  const auto next = [=](int c) {  // of this warp, c or the first one after it
    return c + (warp + S::kDecayWarps - c % S::kDecayWarps) % S::kDecayWarps;
  };
  const auto fetch = [&](int first, int count) {
    for (int c = next(first); c < first + count; c += S::kDecayWarps) {
      const int t = c * kChunk + lane;
      float* const to = shared.gates(c) + lane;
      if (t >= tokens) continue;
      gates.fetch(to, t);
      betas.fetch(to + kChunk, t);
    }
    cp_async_commit();
  };
  const auto fill = [&](int first, int count) {
#pragma unroll 1
    for (int c = next(first); c < first + count; c += S::kDecayWarps) {
      const int t = c * kChunk + lane;
      const float* const from = shared.gates(c) + lane;
      const double g = t < tokens ? gates.value(from, t) : 1;
      const double b = t < tokens ? betas.value(from + kChunk, t) : 0;
      shared.decay(c).fill(lane, g, static_cast<float>(b));
    }
  };
  constexpr int kFirst = 2 * S::kSteps - 1;  // chunks whose decays are there before the first step
  fetch(0, kFirst);
  fetch(kFirst, S::kSteps);
  cp_async_wait<1>();
  fill(0, kFirst);
  fetch(kFirst + S::kSteps, S::kSteps);
  __syncthreads();
  for (int step = 0; step < steps<S>(chunks); step++) {
    __syncthreads();
    const int c = step * S::kSteps + kFirst;
    cp_async_wait<1>();
    fill(c, S::kSteps);
    fetch(c + 2 * S::kSteps, S::kSteps);
  }
}

// Rows of a chunk into shared memory by the copying warps: kCols numbers a row, of which cols are
// real.
template <class S, int kCols, int kRow>
__device__ __forceinline__ void copy_rows(typename S::In* to, const typename S::In* from,
                                          long long stride, int rows, int cols, int thread) {
  using In = typename S::In;
  constexpr int kVectors = kCols / S::kWide, kThreads = 32 * S::kCopyWarps;
  static_assert(kCols % S::kWide == 0, "rows of whole vectors");
#pragma unroll 4
  for (int e = thread; e < kChunk * kVectors; e += kThreads) {
    const int row = e / kVectors, at = e % kVectors * S::kWide;
    const bool real = row < rows && at < cols;
    In* const goal = to + place<In, kRow>(row, at);
    const In* const source = from + (real ? row * stride + at : 0);
    constexpr int kBytes = S::kWide * static_cast<int>(sizeof(In));
    if constexpr (kBytes >= 4)
      cp_async<kBytes>(goal, source, real ? kBytes : 0);
    else
      *goal = real ? *source : In{};
  }
}

template <class S>
__device__ __forceinline__ void copy(const CallArgs& a, const Shared<S>& shared, int thread) {
  using In = typename S::In;
  const Item& item = shared.item();
  const long long hq = item.h / a.group;
  const int tokens = item.tokens, chunks = item.chunks, cols = item.cols;
  const In* q = static_cast<const In*>(a.q) + item.b * a.q_stride[0] + hq * a.q_stride[2] +
                item.start * a.q_stride[1];
  const In* k = static_cast<const In*>(a.k) + item.b * a.k_stride[0] + hq * a.k_stride[2] +
                item.start * a.k_stride[1];
  const In* v = static_cast<const In*>(a.v) + item.b * a.v_stride[0] + item.h * a.v_stride[2] +
                item.start * a.v_stride[1] + item.col0;
  int c = 0;
  const auto fetch_next = [&] {
    if (c < chunks) {
      const int rows = min(tokens - c * kChunk, kChunk);
      if (S::kOutput)
        copy_rows<S, S::K, S::kKeyRow>(shared.queries(c), q, a.q_stride[1], rows, S::K, thread);
      copy_rows<S, S::K, S::kKeyRow>(shared.keys(c), k, a.k_stride[1], rows, S::K, thread);
      copy_rows<S, S::kRealCols, S::kValueRow>(shared.values(c), v, a.v_stride[1], rows, cols,
                                               thread);
      q += kChunk * a.q_stride[1];
      k += kChunk * a.k_stride[1];
      v += kChunk * a.v_stride[1];
    }
    cp_async_commit();
    c++;
  };
#pragma unroll 1
  for (int i = 0; i < 2 * S::kSteps - 1 + S::kAhead; i++) fetch_next();
  cp_async_wait<S::kAhead>();
  __syncthreads();
  for (int step = 0; step < steps<S>(chunks); step++) {
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < S::kSteps; i++) fetch_next();
    cp_async_wait<S::kAhead>();
  }
}
