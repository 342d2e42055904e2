// What the roles of cuda/linear32.cu share: sizes of a tile, shared memory, and a block's item.
#pragma once
#include "arrive.cuh"
#include "call.cuh"
#include "linear32_tiles.cuh"
#include "turns.cuh"

struct PieceArgs {
  float* states;         // (pieces, N, H, K, V): after each piece from zero, then before each piece
  double* decays;        // (pieces, N, H)
  long long piece_size;  // tokens, whole chunks
  int pieces;
  int padding;
};

enum Copies { kSingle = 1, kVectors = 16, kBoxes = 128 };  // copied at once: a number, or bytes

// kTurns: chunks whose outputs are in the making. kStages chunks lie in shared memory or are on
// their way there, and the states before kSlots chunks. kOutRows and kOutCols: what one warp makes
// of a chunk's outputs. kStateRows and kStateCols: what one warp keeps of the state.
//
// kWide: of Copies. All rows of q, k, v and y begin at multiples of 16 bytes and hold whole vectors
// of as many, unless numbers are copied one by one. The copy engine copies boxes.
template <class In_, int K_, int V_, int kCols_, int kTurns_, int kStages_, int kSlots_,
          int kOutRows_, int kOutCols_, int kStateRows_, int kStateCols_, int kCopyWarps_,
          int kDecayWarps_, int kProducts_, int kWide_, bool kOutput_>
struct Shape {
  using In = In_;
  static constexpr int K = K_, V = V_, kCols = kCols_, kTurns = kTurns_, kStages = kStages_;
  static constexpr int kSlots = kSlots_, kOutRows = kOutRows_, kOutCols = kOutCols_;
  static constexpr int kStateRows = kStateRows_, kStateCols = kStateCols_;
  static constexpr int kCopyWarps = kCopyWarps_, kDecayWarps = kDecayWarps_;
  static constexpr int kProducts = kProducts_, kWide = kWide_;
  static constexpr bool kOutput = kOutput_;

  static constexpr int kRealCols = kCols < V ? kCols : V;
  static constexpr int kColBlocks = (V + kCols - 1) / kCols;
  static constexpr int kKeyBoxes = (K + kBoxCols<In> - 1) / kBoxCols<In>;
  static constexpr int kValueBoxes = (kCols + kBoxCols<In> - 1) / kBoxCols<In>;
  static constexpr int kKeyTiles = sizeof(In) == 2 ? (K + 15) / 16 : 2 * kKeyBoxes;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(In));
  static constexpr int kRowParts = kChunk / kOutRows;
  static constexpr int kColParts = (kRealCols + kOutCols - 1) / kOutCols;
  static constexpr int kParts = kRowParts * kColParts;  // warps that make outputs of one chunk
  static constexpr int kOutWarps = kOutput ? kTurns * kParts : 0;
  static constexpr int kStateRowParts = (K + kStateRows - 1) / kStateRows;
  static constexpr int kStateColParts = (kRealCols + kStateCols - 1) / kStateCols;
  static constexpr int kStateWarps = kStateRowParts * kStateColParts;
  static constexpr int kThreads = 32 * (kOutWarps + kStateWarps + kCopyWarps + kDecayWarps);
  // Turns ahead that a warp fetches gates: chunks of large states take their time.
  static constexpr int kGateTurns = K * kRealCols < 2048 ? 3 : 1;
  static constexpr int kStateBox = kStateColParts * kStateCols * 32;  // floats, like the next ones
  static constexpr int kStateSize = (K + 31) / 32 * kStateBox;
  static constexpr int kQuery = kOutput ? kKeyBoxes * kTokenBox<float> : 0;
  static constexpr int kKeysAndValues = (kKeyBoxes + kValueBoxes) * kTokenBox<float>;
  static constexpr int kStage = kQuery + kKeysAndValues;
  static constexpr int kStates = kOutput ? kSlots * kStateSize : 0;
  static constexpr bool kPadded = K % 32 != 0 || kRealCols % 32 != 0;

  // Where each warpgroup has one role, registers go where they are wanted.
  static constexpr bool kMany = kOutWarps + kStateWarps == 12;
  static constexpr bool kRegroups = kOutput && kOutWarps % 4 == 0 && kStateWarps % 4 == 0 &&
                                    (kMany || kOutWarps + kStateWarps == 8) && kDecayWarps == 3 &&
                                    kWide == kBoxes;
  static constexpr int kAtLaunch = kMany ? 128 : 168;  // as ptxas has it for so many threads
  static constexpr int kOutRegisters = kMany ? 152 : 232, kStateRegisters = kMany ? 152 : 176;
  static constexpr int kOtherRegisters = kMany ? 56 : 96;

  static_assert(kWide == kSingle || (K % kVector == 0 && V % kVector == 0),
                "rows of whole vectors");
  static_assert(kWide != kBoxes || kCopyWarps == 1, "one thread has boxes copied");
  static_assert(kOutRows == 16 || kOutRows == 32, "one or two blocks of a chunk");
  static_assert(kOutCols % 8 == 0 && kStateRows % 8 == 0 && kStateCols % 16 == 0, "whole tiles");
  static_assert(kColParts == 1 || kOutCols % 16 == 0, "tiles are read in pairs");
  static_assert(kStateRowParts == 1 || kStateRows % 16 == 0, "here too");
  static_assert(kColParts * kOutCols <= kStateColParts * kStateCols, "outputs need states");
  static_assert(kStateColParts * kStateCols <= kBoxCols<In> * kValueBoxes,
                "values are zeros so far");
  static_assert(kStateRowParts * kStateRows <= (K + 31) / 32 * 32, "keys are zeros so far");
  static_assert(kTurns <= kSlots && kTurns <= kStages && kDecayWarps <= kStages,
                "a warp has turns in the order of phases");
};

// What a block works on.
struct Item {
  long long b, h, hq, n, nh, start, stop;  // the first token of the piece, and one past its last
  long long y;                             // where the first output lies
  int piece, chunks, col0, cols, tokens, padding;
};

// Everything in shared memory, from a multiple of 1024 bytes on. The item lies there too: registers
// are scarce, and its numbers are wanted before and after the chunks.
template <class S>
struct Shared {
  float stages[S::kStages][S::kStage];  // q, k, v
  float states[S::kOutput ? S::kSlots : 1][S::kOutput ? S::kStateSize : 1];
  Decay decays[S::kStages];
  float gates[S::kDecayWarps][S::kGateTurns][2][kChunk];
  Item item;
  Barrier loaded[S::kStages], made[S::kStages], free[S::kStages];
  Barrier state_made[S::kSlots], state_free[S::kSlots];

  using In = typename S::In;

  __device__ __forceinline__ In* queries(int slot) { return reinterpret_cast<In*>(stages[slot]); }
  __device__ __forceinline__ In* keys(int slot) {
    return reinterpret_cast<In*>(stages[slot] + S::kQuery);
  }
  __device__ __forceinline__ In* values(int slot) {
    return keys(slot) + S::kKeyBoxes * kTokenBox<In>;
  }
};

template <class S>
__device__ __forceinline__ Item find_item(const CallArgs& a, const PieceArgs& pieces) {
  Item x;
  const unsigned count = pieces.pieces - (S::kOutput ? 0 : 1), H = static_cast<unsigned>(a.H);
  const unsigned item = blockIdx.x / S::kColBlocks, nh = item / count;
  x.col0 = static_cast<int>(blockIdx.x % S::kColBlocks) * S::kCols;
  x.cols = min(S::kCols, S::V - x.col0);
  x.piece = static_cast<int>(item % count);
  x.nh = nh;
  x.n = nh / H;
  x.h = nh % H;
  x.hq = x.h / static_cast<unsigned>(a.group);
  const Sequence seq = sequence(a, x.n);
  x.b = seq.b;
  x.start = min(seq.start + x.piece * pieces.piece_size, seq.stop);
  x.stop = min(x.start + pieces.piece_size, seq.stop);
  x.y = x.b * a.y_stride[0] + x.start * a.y_stride[1] + x.h * a.y_stride[2] + x.col0;
  x.tokens = static_cast<int>(x.stop - x.start);
  x.chunks = (x.tokens + kChunk - 1) / kChunk;
  return x;
}
