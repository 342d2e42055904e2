// The queue of packed sequences alone, as the warps of several blocks ask it.
#include "../../cuda/queue_sm90.cuh"

// items: (tickets); block b has the tickets b, b + gridDim.x and so on.
__global__ void find_all(const CallArgs a, Item* items, int tickets) {
  Queue queue(a, threadIdx.x);
  for (int ticket = blockIdx.x; ticket < tickets; ticket += gridDim.x) {
    const Item item = queue.find(ticket);
    if (threadIdx.x == 0) items[ticket] = item;
  }
}
