// How the blocks of linear_sm90.cu deal out packed sequences: each takes the next one from a queue,
// longest first, whenever it has copied the last. Nobody but the device needs to know lengths, and
// who works on a sequence does not show in its outputs.
#pragma once
#include "longest_first.cuh"
#include "rows_sm90.cuh"

// Takes items from the queue, hands them to the other roles and has them copied, by one warp.
template <class S, int kStages>
__device__ __forceinline__ void feed_from_queue(Shared<S, kStages>& shared, Walk& w,
                                                unsigned* taken, const TensorMap& q_map,
                                                const TensorMap& k_map, const TensorMap& v_map,
                                                int lane) {
  const CallArgs& a = w.a;
  const unsigned all = static_cast<unsigned>(a.N * a.H);
  Queue queue(a, static_cast<unsigned>(a.H), a.state != nullptr, lane);
  queue.begin();
  Turn<kItems> to;
  Turn<kStages> stage;
  unsigned ticket = blockIdx.x;
  do {
    const QueueItem item = queue.find(ticket);
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
