// How the blocks of linear_sm90.cu deal out packed sequences: each takes the next one from a queue,
// longest first, whenever it has copied the last. Nobody but the device needs to know lengths, and
// who works on a sequence does not show in its outputs.
#pragma once
#include "rows_sm90.cuh"

// The queue as one warp of a block sees it. It has no memory: all blocks go through the offsets in
// the same way, once for every length there is.
struct Queue {
  static constexpr int kFinest = 64;  // sequences, of which every number of chunks is told apart
  static constexpr int kFine = 1024;  // within an eighth or a quarter; else within a half
  const CallArgs& a;
  int lane, coarse;
  int rank, lower = -1;  // of the lengths at hand, and of the next ones below
  int first = 0;         // sequence of the 32 at hand
  int own, start, stop;  // this lane's, and its rank
  unsigned passed = 0;   // items before those

  __device__ __forceinline__ Queue(const CallArgs& call, int l)
      : a(call), lane(l), coarse(a.N <= kFinest ? 0 : (a.N <= kFine ? 21 : 23)) {
    int longest = -1;
#pragma unroll 4
    for (int n = lane; n < a.N; n += 32) {
      const Sequence seq = sequence(a, n);
      longest = max(longest, rank_of(static_cast<int>(seq.stop - seq.start)));
    }
    rank = __reduce_max_sync(0xffffffffu, longest);
    look();
  }

  // The item of a ticket; of tickets that are asked for in rising order.
  __device__ __forceinline__ Item find(unsigned ticket) {
    const unsigned H = static_cast<unsigned>(a.H);
    while (rank >= 0) {
      const unsigned found = __ballot_sync(0xffffffffu, own == rank);
      const unsigned here = __popc(found) * H, at = ticket - passed;
      if (at < here) {
        const unsigned before = __popc(found & ((1u << lane) - 1));
        const bool mine = own == rank && before == at / H;
        const int source = __ffs(__ballot_sync(0xffffffffu, mine)) - 1;
        return {first + source, static_cast<int>(at % H), __shfl_sync(0xffffffffu, start, source),
                __shfl_sync(0xffffffffu, stop, source)};
      }
      passed += here;
      if (own < rank) lower = max(lower, own);
      first += 32;
      if (first >= a.N) {
        rank = __reduce_max_sync(0xffffffffu, lower);
        lower = -1;
        first = 0;
      }
      look();
    }
    return {-1, 0, 0, 0};
  }

 private:
  // Rises with the number of chunks: its first bits, with their exponent. Sequences without tokens
  // have one where their states are to be written.
  __device__ __forceinline__ int rank_of(int tokens) const {
    if (tokens == 0) return a.state ? 0 : -1;
    const float chunks = static_cast<float>((tokens + kChunk - 1) / kChunk);
    return static_cast<int>(__float_as_uint(chunks) >> coarse);
  }
  __device__ __forceinline__ void look() {
    own = -1;
    if (first + lane >= a.N) return;
    const Sequence seq = sequence(a, first + lane);
    start = static_cast<int>(seq.start);
    stop = static_cast<int>(seq.stop);
    own = rank_of(stop - start);
  }
};

// Takes items from the queue, hands them to the other roles and has them copied, by one warp.
template <class S, int kStages>
__device__ __forceinline__ void feed_from_queue(Shared<S, kStages>& shared, Walk& w,
                                                unsigned* taken, const TensorMap& q_map,
                                                const TensorMap& k_map, const TensorMap& v_map,
                                                int lane) {
  const CallArgs& a = w.a;
  const unsigned all = static_cast<unsigned>(a.N * a.H);
  Queue queue(a, lane);
  Turn<kItems> to;
  Turn<kStages> stage;
  unsigned ticket = blockIdx.x;
  do {
    const Item item = queue.find(ticket);
    w.begin(item);
    if (lane == 0) {
      shared.taken[to.slot].wait(to.parity ^ 1);
      shared.items[to.slot] = item;
      shared.dealt[to.slot].arrive();
      const int early = max(w.chunks - kStages, 0);
      load(shared, w, 0, early, stage, q_map, k_map, v_map, false);
      if (gridDim.x < all && w.n >= 0) ticket = gridDim.x + atomicAdd(taken, 1u);
      load(shared, w, early, w.chunks, stage, q_map, k_map, v_map, false);
    }
    to.next();
    ticket = __shfl_sync(0xffffffffu, gridDim.x < all ? ticket : all, 0);
  } while (w.n >= 0);
  clear_rest(a, w.cut.V, static_cast<int>(sequence(a, a.N - 1).stop), 0, static_cast<int>(a.H),
             blockIdx.x, gridDim.x, lane);
}

// The next item, by a warp of any other role; whether there is one.
template <class S, int kStages>
__device__ __forceinline__ bool take(Shared<S, kStages>& shared, Walk& w, Turn<kItems>& from,
                                     int lane) {
  shared.dealt[from.slot].wait(from.parity);
  w.begin(shared.items[from.slot]);
  arrive(shared.taken[from.slot], lane);
  from.next();
  return w.n >= 0;
}
