// The delta rule in chunks of 64 tokens on the warpgroup products of sm_90a, for bfloat16 inputs
// that the copy engine can read. The equations are those of delta.cu.
//
// A block walks through the chunks of a sequence for 64 columns of V of one head. Its warpgroups
// have roles:
//   the first feeds: one warp has q, k and v copied, one y, two weigh tokens;
//   the next two, by turns, make the inverse and the scores of chunks to come;
//   the last keeps the state in registers and makes outputs.
// Stages, weights and tables go from hand to hand through barriers in shared memory.
//
// Where heads are too few to fill the chip, a block has a piece of a sequence. It begins with no
// state, so many tokens before its piece that gates have forgotten all earlier ones: their decay is
// less than kForgotten. Where gates are too large for that, or keys so long that a state may grow
// between them, it waits for the state that the piece before has left. Blocks of earlier pieces
// must be started first.
#include "delta_keep_sm90.cuh"
#include "delta_prepare_sm90.cuh"

// grid: any number of blocks, or as many as there are items where sequences are cut. block: 512
// threads.
template <int K, int kStages, bool kPieces, bool kNormalise>
__global__ void __launch_bounds__(4 * kGroup, 1)
    delta(const CallArgs a, const DeltaPieceArgs cut, const __grid_constant__ TensorMap q_map,
          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
          const __grid_constant__ TensorMap y_map) {
  using S = Shape<K>;
  static_assert(K % 64 == 0, "keys fill whole tiles");
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared =
      *reinterpret_cast<Shared<S, kStages>*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  // Through shuffles: where registers are scarce, what is known by its thread's number is worked
  // out again and again.
  const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  const int group = threadIdx.x / kGroup, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  {
    const Item first(a, cut, blockIdx.x);
    int found = 0;
    if (kPieces && first.piece > 0) found = warm_up(a, first, shared.forgotten);
    if (threadIdx.x == 0) shared.warm_chunks = max(found, 0), shared.grows[0] = found < 0;
    const Feed feed(a, first, max(found, 0));
    if (group == 0 && warp > 1)  // the first gates are what all wait for
#pragma unroll 1
      for (int i = 0; i < 3; i++) feed.fetch_gates(shared.gates, warp - 2 + kDecayWarps * i, lane);
  }
  if (threadIdx.x / 32 == 4) {
    unsigned chunks = 0;
    for (int i = block_index() + lane * gridDim.x; i < Item::count(a, cut); i += 32 * gridDim.x)
      chunks += Item(a, cut, i).chunks;
    chunks = __reduce_add_sync(0xffffffffu, chunks);
    if (lane == 0) shared.chunks = chunks + (kPieces ? shared.warm_chunks : 0);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      shared.loaded[i].init(1);
      shared.weighed[i].init(1);
      shared.finished[i].init(4);
      shared.free[i].init(5);
    }
    for (int i = 0; i < kTables; i++) {
      shared.prepared[i].init(4);
      shared.tables_free[i].init(4);
    }
    fence_barriers();
  }
  for (int i = 0; i < kTables; i++)  // above the diagonal scores stay zeros
    for (int e = threadIdx.x; e < kTile / 8; e += blockDim.x)
      reinterpret_cast<uint4*>(shared.tables[i].scores)[e] = {0, 0, 0, 0};
  fence_shared();
  __syncthreads();

  if (group == 0) {
    set_registers<128, S::kFeedRegisters>();
    Turn<kStages> stage;
    const int items = Item::count(a, cut), warm = kPieces ? shared.warm_chunks : 0;
    if (warp == 0) {
      if (lane > 0) return;
#pragma unroll 1
      for (int i = block_index(); i < items; i += gridDim.x)
        load<S>(shared, Feed(a, Item(a, cut, i), warm), stage, q_map, k_map, v_map);
    } else if (warp == 1) {
#pragma unroll 1
      for (int i = block_index(); i < items; i += gridDim.x)
        store<S>(shared, Feed(a, Item(a, cut, i), warm), cut.V, warm, stage, y_map, lane);
      if (lane == 0) wait_stores();
    } else {
      unsigned done = 0;
#pragma unroll 1
      for (int i = block_index(); i < items; i += gridDim.x) {
        const Feed feed(a, Item(a, cut, i), warm);
        if (i >= gridDim.x)
#pragma unroll 1
          for (int n = 0; n < 3; n++)
            feed.fetch_gates(shared.gates, warp - 2 + kDecayWarps * n, lane);
        make_weights<S, kNormalise>(shared, feed, done, warp - 2, lane);
        done += (feed.stop - feed.start + kChunk - 1) / kChunk;
      }
    }
  } else if (group <= kPreparers) {
    set_registers<128, S::kPrepareRegisters>();
    Preparer<S, kStages> preparer{shared, warp, lane, group - 1u};
    preparer.walk();
  } else {
    set_registers<128, S::kStateRegisters>();
    Keeper<K, kStages, kPieces> keeper(shared, a, cut);
#pragma unroll 1
    for (int i = block_index(); i < Item::count(a, cut); i += gridDim.x) {
      const int left = keeper.begin(i);
#pragma unroll 1
      for (int c = 0; c < left; c++) {
        if (kPieces && c == shared.warm_chunks && shared.grows[0])
          keeper.take_over(i - cut.column_blocks);
        keeper.step();
      }
      keeper.end(i);
    }
  }
}
