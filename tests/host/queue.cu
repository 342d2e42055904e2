// The queue of packed sequences alone, as the warps of several blocks ask it.
#include "../../cuda/longest_first.cuh"

// items: (tickets); block b has the tickets b, b + gridDim.x and so on. With `resumed`, as warps
// ask it that have found where another one has left it.
__global__ void find_all(const CallArgs a, QueueItem* items, int tickets, int resumed) {
  __shared__ QueueState state;
  Queue queue(a, static_cast<unsigned>(a.H), a.state != nullptr, threadIdx.x);
  queue.begin();
  for (int ticket = blockIdx.x; ticket < tickets; ticket += gridDim.x) {
    if (resumed) {
      queue.leave(state);
      queue.resume(state);
    }
    const QueueItem item = queue.find(ticket);
    if (threadIdx.x == 0) items[ticket] = item;
  }
}
