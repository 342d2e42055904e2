// In which order blocks take packed sequences: longest first. Nobody but the device needs to know
// lengths.
#pragma once
#include "call.cuh"
#include "warpgroups.cuh"

// A sequence, and which of its items: its heads, or columns of them. n is -1 behind the last one.
struct QueueItem {
  int n, part, start, stop;
};

// Where a queue stands between two tickets, for all lanes and for each.
struct QueuePlace {
  int rank, lower;  // of the lengths at hand, and of the next ones below, as far as is known
  int first;        // sequence of the 32 at hand
  unsigned passed;  // items before those
};
struct QueueLane {
  int rank, start, stop;  // of its sequence
};
// The same in memory.
struct QueueState {
  QueuePlace place;
  QueueLane lanes[32];
};

// The queue as one warp of a block sees it. Blocks share nothing but tickets: all go through the
// offsets in the same way, once for every length there is.
struct Queue {
  static constexpr int kFinest = 64;  // sequences, of which every number of chunks is told apart
  static constexpr int kFine = 1024;  // within an eighth or a quarter; else within a half
  const CallArgs& a;
  unsigned parts;   // items of a sequence
  bool with_empty;  // whether sequences without tokens are in it, behind the others
  int lane, coarse;
  QueuePlace at;
  QueueLane own;

  __device__ __forceinline__ Queue(const CallArgs& call, unsigned items, bool empty, int l)
      : a(call),
        parts(items),
        with_empty(empty),
        lane(l),
        coarse(a.N <= kFinest ? 0 : (a.N <= kFine ? 21 : 23)) {}

  __device__ __forceinline__ void begin() {
    int longest = -1;
#pragma unroll 4
    for (int n = lane; n < a.N; n += 32) {
      const Sequence seq = sequence(a, n);
      longest = max(longest, rank_of(static_cast<int>(seq.stop - seq.start)));
    }
    at = {__reduce_max_sync(0xffffffffu, longest), -1, 0, 0};
    look();
  }
  // Where another warp has left it.
  __device__ __forceinline__ void resume(const QueueState& from) {
    at = from.place;
    own = from.lanes[lane];
  }
  __device__ __forceinline__ void leave(QueueState& to) const {
    const int lower = __reduce_max_sync(0xffffffffu, at.lower);
    __syncwarp();
    to.lanes[lane] = own;
    if (lane == 0) to.place = {at.rank, lower, at.first, at.passed};
    __syncwarp();
  }

  // The item of a ticket; of tickets that are asked for in rising order.
  __device__ __forceinline__ QueueItem find(unsigned ticket) {
    while (at.rank >= 0) {
      const unsigned found = __ballot_sync(0xffffffffu, own.rank == at.rank);
      const unsigned here = __popc(found) * parts, past = ticket - at.passed;
      if (past < here) {
        const unsigned before = __popc(found & ((1u << lane) - 1));
        const bool mine = own.rank == at.rank && before == past / parts;
        const int source = __ffs(__ballot_sync(0xffffffffu, mine)) - 1;
        return {at.first + source, static_cast<int>(past % parts),
                __shfl_sync(0xffffffffu, own.start, source),
                __shfl_sync(0xffffffffu, own.stop, source)};
      }
      at.passed += here;
      if (own.rank < at.rank) at.lower = max(at.lower, own.rank);
      at.first += 32;
      if (at.first >= a.N) {
        at.rank = __reduce_max_sync(0xffffffffu, at.lower);
        at.lower = -1;
        at.first = 0;
      }
      look();
    }
    return {-1, 0, 0, 0};
  }

 private:
  // Rises with the number of chunks: its first bits, with their exponent.
  __device__ __forceinline__ int rank_of(int tokens) const {
    if (tokens == 0) return with_empty ? 0 : -1;
    const float chunks = static_cast<float>((tokens + kChunk - 1) / kChunk);
    return static_cast<int>(__float_as_uint(chunks) >> coarse);
  }
  __device__ __forceinline__ void look() {
    own = {-1, 0, 0};
    if (at.first + lane >= a.N) return;
    const Sequence seq = sequence(a, at.first + lane);
    own.start = static_cast<int>(seq.start);
    own.stop = static_cast<int>(seq.stop);
    own.rank = rank_of(own.stop - own.start);
  }
};
