// What the roles of cuda/delta32.cu share: sizes of a tile, shared memory, and a block's item.
#pragma once
#include "arrive.cuh"
#include "call.cuh"
#include "delta32_outputs.cuh"
#include "delta32_prepare.cuh"
#include "delta32_state.cuh"
#include "turns.cuh"

// kTeams chunks are prepared and outputs of kTurns chunks are made at a time. kStages chunks lie in
// shared memory or are on their way there, and the states before kSlots chunks, with what the
// chunks write. kOutCols: what one warp makes of 16 rows of outputs. kStateRows: what one warp
// keeps of 16 columns of the state. In is the type of q, k, v and y, whose rows hold whole vectors
// of kWide numbers and begin at multiples of their size.
template <class In_, int K_, int V_, int kCols_, int kTeams_, int kTurns_, int kStages_,
          int kSlots_, int kOutCols_, int kStateRows_, int kCopyWarps_, int kProducts_, int kWide_,
          bool kNormalise_>
struct Shape {
  using In = In_;
  static constexpr int K = K_, V = V_, kCols = kCols_, kTeams = kTeams_, kTurns = kTurns_;
  static constexpr int kStages = kStages_, kSlots = kSlots_;
  static constexpr int kOutCols = kOutCols_, kStateRows = kStateRows_;
  static constexpr int kCopyWarps = kCopyWarps_, kProducts = kProducts_, kWide = kWide_;
  static constexpr bool kNormalise = kNormalise_;

  static constexpr int kRealCols = kCols < V ? kCols : V;
  static constexpr int kColBlocks = (V + kCols - 1) / kCols;
  static constexpr int kKeyTiles = (K + 15) / 16, kValueTiles = (kRealCols + 15) / 16;
  static constexpr int kStateParts = (K + kStateRows - 1) / kStateRows;
  static constexpr int kKeyRow = (kStateParts > 1 ? kStateParts * kStateRows : K + 31) / 32 * 32;
  static constexpr int kValueRow = (kCols + 31) / 32 * 32;
  static constexpr int kColParts = (kRealCols + kOutCols - 1) / kOutCols;
  static constexpr int kParts = kChunk / kBlock * kColParts;  // warps for outputs of one chunk
  static constexpr int kOutWarps = kTurns * kParts;
  static constexpr int kStateWarps = kValueTiles * kStateParts;
  static constexpr int kPrepareWarps = kTeams * kPreparers;
  static constexpr int kOthers = 1 + kCopyWarps;  // the first one makes decays
  static constexpr int kRows = (kOutWarps > kStateWarps ? kOutWarps + 1 : kStateWarps + 1) / 2;
  static constexpr int kFree = 4 * kRows - kOutWarps - kStateWarps;
  static constexpr int kLate = kOthers > kFree ? kOthers - kFree : 0;
  static constexpr int kThreads = 32 * (4 * kRows + kPrepareWarps + kLate);
  static constexpr int kStateSize = kValueTiles * 16 * kKeyRow;  // numbers, like the next ones
  static constexpr int kStage = kChunk * (2 * kKeyRow + kValueRow);
  static constexpr int kNumbers = kStages * kStage + kSlots * (kStateSize + kChunk * kKeyRow);
  static constexpr bool kPadded = K != kKeyRow || kRealCols % 32 != 0;

  static_assert(kWide == 1 || (kWide * sizeof(In) == 16 && K % kWide == 0 && V % kWide == 0),
                "rows of whole vectors");
  static_assert(kOutCols % 8 == 0 && kColParts * kOutCols <= kValueTiles * 16, "whole tiles");
  static_assert(kStateRows % (kStateParts > 1 ? 64 : 8) == 0, "tiles to find by their number");
  static_assert(kTeams <= kSlots && kTurns <= kSlots && kSlots <= kStages,
                "a warp that has turns never is a whole phase late");
  static_assert(2 + kTeams + (kStateParts > 1 ? kValueTiles : 0) <= 16, "barriers");
};

// What a warp does, and as which of those that do the same. Of four warps in a row, each has a
// tensor core and an instruction cache of its own: outputs are left to the first two of every four,
// the state to the other two, which balances them.
enum Job { kOutputs, kState, kPreparations, kOther };
struct Role {
  Job job;
  int index;
};
template <class S>
__device__ __forceinline__ Role find_role(int warp) {
  const int i = warp / 4 * 2 + warp % 2, late = warp - 4 * S::kRows;
  if (late >= S::kPrepareWarps) return {kOther, S::kFree + late - S::kPrepareWarps};
  if (late >= 0) return {kPreparations, late};
  if (warp % 4 < 2) return i < S::kOutWarps ? Role{kOutputs, i} : Role{kOther, i - S::kOutWarps};
  if (i < S::kStateWarps) return {kState, i};
  return {kOther, 2 * S::kRows - S::kOutWarps + i - S::kStateWarps};
}

// What a block works on.
struct Item {
  long long b, h, n, nh, start, stop;  // the first token, and one past the last
  long long y;                         // where the first output lies
  int chunks, col0, cols, tokens;
};

// Everything in shared memory. The item lies there too: registers are scarce, and its numbers are
// wanted before and after the chunks.
template <class S>
struct Shared {
  float stages[S::kStages][S::kStage];  // q, k, and v, then W v, then errors
  float states[S::kSlots][S::kStateSize];
  float writes[S::kSlots][kChunk * S::kKeyRow];
  Workbench benches[S::kTeams];
  Decay decays[S::kStages];
  Item item;
  Barrier loaded[S::kStages], made[S::kStages], free[S::kStages];  // made: decays
  // prepared: writes and W v. known: errors, and the state before the chunk. used: the latter.
  Barrier prepared[S::kSlots], known[S::kSlots], used[S::kSlots];

  __device__ __forceinline__ float* queries(int stage) { return stages[stage]; }
  __device__ __forceinline__ float* keys(int stage) { return stages[stage] + kChunk * S::kKeyRow; }
  __device__ __forceinline__ float* values(int stage) {
    return stages[stage] + 2 * kChunk * S::kKeyRow;
  }
};

template <class S>
__device__ __forceinline__ Item find_item(const CallArgs& a) {
  Item x;
  const long long item = blockIdx.x;
  x.col0 = static_cast<int>(item % S::kColBlocks) * S::kCols;
  x.cols = min(S::kCols, S::V - x.col0);
  x.nh = item / S::kColBlocks;
  x.n = x.nh / a.H;
  x.h = x.nh % a.H;
  const Sequence seq = sequence(a, x.n);
  x.b = seq.b;
  x.start = seq.start;
  x.stop = seq.stop;
  x.y = x.b * a.y_stride[0] + x.start * a.y_stride[1] + x.h * a.y_stride[2] + x.col0;
  x.tokens = static_cast<int>(x.stop - x.start);
  x.chunks = (x.tokens + kChunk - 1) / kChunk;
  return x;
}
