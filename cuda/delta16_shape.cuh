// What the roles of cuda/delta16.cu share: sizes of a tile, shared memory, and a block's item.
#pragma once
#include "arrive.cuh"
#include "call.cuh"
#include "delta16_tiles.cuh"
#include "turns.cuh"

// kTeams chunks are prepared at a time. kStages chunks lie in shared memory or are on their way
// there, and what was prepared of kSlots. kWide: numbers copied at once.
template <class In_, int K_, int V_, int kTeams_, int kDecayWarps_, int kStages_, int kSlots_,
          int kProducts_, int kWide_, bool kNormalise_>
struct Shape {
  using In = In_;
  static constexpr int K = K_, V = V_, kTeams = kTeams_, kDecayWarps = kDecayWarps_;
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
  static constexpr bool kFew = kKeyTiles <= 4;         // tiles of a state's warp
  static constexpr int kWarps = kStateWarps + kTeams + kDecayWarps + 1, kThreads = 32 * kWarps;

  static_assert(K <= 64 && V <= 64, "a state's warp for each 16 columns");
  static_assert(kTeams >= 2, "the first two warps that prepare come before those that feed");
  static_assert(kStages % 2 == 0 && kStages >= 4, "decays are made for two chunks at a time");
  static_assert(kTeams <= kSlots && kSlots <= kStages && 2 * kDecayWarps <= kStages,
                "a warp that has turns never is a whole phase late");
};

// What a warp does, and as which of those that do the same. Of four warps in a row, each has a
// tensor core and an instruction cache of its own: the state's warps are as far apart as can be,
// and what is rarely busy shares theirs first.
enum Job { kPreparations, kState, kDecays, kCopies };
struct Role {
  Job job;
  int index;
};
template <class S>
__device__ __forceinline__ Role find_role(int warp) {
  constexpr int kFirst = S::kStateWarps + (S::kStateWarps > 2 ? S::kTeams : 2);
  if (warp < S::kStateWarps) return {kState, warp};
  if (warp < kFirst) return {kPreparations, warp - S::kStateWarps};
  if (warp == kFirst) return {kDecays, 0};
  if (warp == kFirst + 1) return {kCopies, 0};
  const int i = warp - 2 - S::kStateWarps;
  return i < S::kTeams ? Role{kPreparations, i} : Role{kDecays, 1 + i - S::kTeams};
}

// What a block works on.
struct Item {
  long long b, h, n, nh, start, stop;  // the first token, and one past the last
  long long y;                         // where the first output lies
  int chunks, tokens;
};

// What is prepared of a chunk. Rows of groups: delta16_tiles.cuh.
template <class S>
struct alignas(16) Slot {
  float writes[kChunk * S::kRow];         // a row for each token: -W d k
  float errors[S::kStateRows * kChunk];   // a row of groups for each column of V: W v
  float keys[S::kKeyTiles * 8 * kChunk];  // a row of groups for each row of K, times to_end
  float scores[kChunk * kChunk];          // a row of groups for each token
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
  Barrier prepared[S::kSlots], used[S::kSlots];

  __device__ __forceinline__ float* queries(int stage) { return stages[stage]; }
  __device__ __forceinline__ float* keys(int stage) { return stages[stage] + kChunk * S::kRow; }
  __device__ __forceinline__ float* values(int stage) {
    return stages[stage] + 2 * kChunk * S::kRow;
  }
};

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
