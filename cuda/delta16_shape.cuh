// What the roles of cuda/delta16.cu share: sizes of a tile, shared memory, and a block's item.
#pragma once
#include "call.cuh"
#include "delta16_tiles.cuh"

// kTeams chunks are prepared and outputs of kTurns chunks are made at a time. kStages chunks lie in
// shared memory or are on their way there, and what kSlots chunks are advanced by, with the states
// before them. kWide: numbers copied at once.
template <class In_, int K_, int V_, int kTeams_, int kTurns_, int kStages_, int kSlots_,
          int kProducts_, int kWide_, bool kNormalise_>
struct Shape {
  using In = In_;
  static constexpr int K = K_, V = V_, kTeams = kTeams_, kTurns = kTurns_;
  static constexpr int kStages = kStages_, kSlots = kSlots_;
  static constexpr int kProducts = kProducts_, kWide = kWide_;
  static constexpr bool kNormalise = kNormalise_;
  static constexpr bool kHeld = sizeof(In) == 2 && kWide > 1;  // copied by way of registers

  static constexpr int kKeyTiles = (K + 7) / 8, kValueTiles = (V + 7) / 8;
  static constexpr int kCols = (kKeyTiles > kValueTiles ? kKeyTiles : kValueTiles) * 8;
  static constexpr int kRow = kCols % 16 == 8 ? kCols : kCols + 8;
  static constexpr int kStateWarps = (V + 15) / 16;
  static constexpr int kStateRows = kStateWarps * 16;  // columns of V
  static constexpr int kStage = 3 * kChunk * kRow;     // numbers: q, k, v
  static constexpr bool kSmall = kStateWarps <= 2;
  static constexpr bool kFew = kSmall && kKeyTiles <= 4;  // tiles of a state's warp
  static constexpr int kAcross = (kKeyTiles + kValueTiles) * 8 > 64 ? 4 : 2;  // columns a lane
  static constexpr int kOthers = kStateWarps + 2;
  static constexpr int kMany = kTeams + kTurns;
  static constexpr int kRows = kMany > (kOthers + 1) / 2 * 2 ? kMany / 2 : (kOthers + 1) / 2;
  static constexpr int kThreads =
      32 * (kSmall ? 4 * kRows - (kOthers > 2 * kRows - 2 ? 0 : 2) : 6 + kMany);

  static_assert(K <= 64 && V <= 64, "four columns a lane for all of k and v");
  static_assert(kTeams % 2 == 0 && kTurns % 2 == 0, "one after the other of two warps in four");
  static_assert(kStages % 2 == 0, "decays are made for two chunks at a time");
  static_assert(kTeams <= kSlots && kTurns <= kSlots && kSlots <= kStages,
                "a warp that has turns never is a whole phase late");
  static_assert((kSlots - kTeams) % kTurns == 0, "who prepares waits for one that makes outputs");
};

// What a warp does, and as which of those that do the same. Of four warps in a row, each has a
// tensor core and an instruction cache of its own. Two warps of the state leave theirs to hardly
// anybody else; of more, each has one, and the rest is dealt out evenly.
enum Job { kOutputs, kPreparations, kState, kDecays, kCopies, kNothing };
struct Role {
  Job job;
  int index;
};
template <class S>
__device__ __forceinline__ Role find_role(int warp) {
  if (S::kSmall) {
    const int i = warp / 4 * 2 + warp % 2;
    if (warp % 4 < 2) {
      if (i < S::kTurns) return {kOutputs, i};
      return i < S::kMany ? Role{kPreparations, i - S::kTurns} : Role{kNothing, 0};
    }
    if (i < S::kStateWarps) return {kState, i};
    return {i == S::kStateWarps ? kDecays : (i == S::kStateWarps + 1 ? kCopies : kNothing), 0};
  }
  if (warp < 4) return {warp < S::kStateWarps ? kState : kNothing, warp};
  const int i = warp - 4 - S::kTurns;
  if (i < 0) return {kOutputs, warp - 4};
  constexpr int kFeeds = S::kTurns % 4 == 0 ? S::kTeams : 2;
  if (i < kFeeds) return {kPreparations, i};
  if (i == kFeeds) return {kDecays, 0};
  return i == kFeeds + 1 ? Role{kCopies, 0} : Role{kPreparations, i - 2};
}

// What a block works on.
struct Item {
  long long b, h, n, nh, start, stop;  // the first token, and one past the last
  long long y;                         // where the first output lies
  int chunks, tokens;
};

// What is prepared of a chunk, and then made of it. Rows of groups: delta16_tiles.cuh.
template <class S>
struct alignas(16) Slot {
  float writes[kChunk * S::kRow];         // a row for each token: -W d k
  float state[S::kStateRows * S::kRow];   // a row for each column of V: before the chunk
  float errors[S::kStateRows * kChunk];   // a row of groups for each column of V; first W v
  float keys[S::kKeyTiles * 8 * kChunk];  // a row of groups for each row of K, times to_end
  float whole, whole_rest, padding[2];
};

// Everything in shared memory. The item lies there too: registers are scarce.
template <class S>
struct Shared {
  float stages[S::kStages][S::kStage];
  Slot<S> slots[S::kSlots];
  Decay decays[S::kStages];
  float alike[S::kTeams][kChunk][kDiagonalRow];  // what one key has of another, transposed
  Item item;
  Barrier loaded[S::kStages], made[S::kStages], free[S::kStages];  // made: decays
  // prepared: all but the state. known: errors, and the state before the chunk. used: everything.
  Barrier prepared[S::kSlots], known[S::kSlots], used[S::kSlots];

  __device__ __forceinline__ float* queries(int stage) { return stages[stage]; }
  __device__ __forceinline__ float* keys(int stage) { return stages[stage] + kChunk * S::kRow; }
  __device__ __forceinline__ float* values(int stage) {
    return stages[stage] + 2 * kChunk * S::kRow;
  }
};

// One of n things by turns, and how often it has been come back to, modulo 2.
template <int n>
struct Turn {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void skip(int count) {  // at most n
    slot += count;
    if (slot >= n) slot -= n, parity ^= 1;
  }
};

// By a warp whose lanes have all done with what the barrier is for.
__device__ __forceinline__ void arrive(Barrier& barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier.arrive();
}

__device__ __forceinline__ Item find_item(const CallArgs& a) {
  Item x;
  x.nh = blockIdx.x;
  x.n = x.nh / a.H;
  x.h = x.nh % a.H;
  const Sequence seq = sequence(a, x.n);
  x.b = seq.b;
  x.start = seq.start;
  x.stop = seq.stop;
  x.y = x.b * a.y_stride[0] + x.start * a.y_stride[1] + x.h * a.y_stride[2];
  x.tokens = static_cast<int>(x.stop - x.start);
  x.chunks = (x.tokens + kChunk - 1) / kChunk;
  return x;
}
