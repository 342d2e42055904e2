// The delta rule in chunks of 64 tokens on the warpgroup products of sm_90a, for bfloat16 inputs
// that the copy engine can read. The equations are those of delta.cu.
//
// A block walks through the chunks of a sequence for 64 or 128 columns of V of one head. Its
// warpgroups have roles:
//   the first ones, by turns, have a chunk to come copied, weigh its tokens, make the inverse and
//   the scores, and have outputs copied away; the others keep 64 columns of the state each, in
//   registers, and make outputs.
// Stages of shared memory go from hand to hand through barriers.
//
// Packed sequences are taken from a queue, the longest first, by whichever block has done with
// others. Where heads are too few to fill the chip, a block has a piece of a sequence. It begins
// with no state, so many tokens before its piece that gates have mostly forgotten all earlier ones:
// their decay is less than kForgotten. Where gates are too large for that, or keys so long that a
// state may grow between them, it waits for the state that the piece before has left. The block of
// the piece before comes by the state there and checks that what is left of it is kNegligible.
// Where it is not, all later pieces are gone through once more, one after the other. Blocks of
// earlier pieces must be started first.
#include "delta_copies_sm90.cuh"
#include "delta_keep_sm90.cuh"
#include "delta_invert_sm90.cuh"
#include "delta_weigh_sm90.cuh"

// grid: any number of blocks, or as many as there are items where sequences are cut. block:
// Shape<K>::kThreads.
template <int K, int kStages, Dealing kDealing, bool kNormalise>
__global__ void __launch_bounds__(Shape<K>::kThreads, 1)
    delta(const CallArgs a, const DeltaPieceArgs cut, const __grid_constant__ TensorMap q_map,
          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
          const __grid_constant__ TensorMap y_map) {
  using S = Shape<K>;
  static_assert(K % 64 == 0, "keys fill whole tiles");
  DYNAMIC_SHARED(unsigned char, raw);
  // Through afresh: if the compiler knew the alignment, it would keep addresses ready and spill.
  auto& shared = *reinterpret_cast<Shared<S, kStages>*>(
      raw + (1024 - afresh(shared_address(raw)) % 1024) % 1024);
  // Through shuffles: where registers are scarce, what is known by its thread's number is worked
  // out again and again.
  const unsigned lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x % 32);
  const unsigned group = __shfl_sync(0xffffffffu, threadIdx.x / kGroup, 0);
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  if (kDealing == kByQueue) begin_queue(shared, a, cut, lane);
  if (kDealing == kInPieces) {
    Beginning found[2];
    find_beginnings(found, a, cut, blockIdx.x, shared.forgotten);
    if (threadIdx.x == 0) {
      shared.warm_chunks = max(found[0].chunks, 0), shared.grows[0] = found[0].chunks < 0;
      shared.look = found[1].left < 0 ? cut.piece_size / kChunk - found[1].chunks : -1;
      shared.left = found[1].left, shared.again = shared.done = 0;
      for (int n = 0; n < S::kKeepers; n++) shared.doubtful[n] = 0;
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      shared.loaded[i].init(1);
      shared.values[i].init(1);
      init_for_warps(shared.prepared[i], 4);
      init_for_warps(shared.free[i], 4 * S::kKeepers);
      shared.places[i].open = 0;
    }
    fence_barriers();
  }
  for (int i = 0; i < kStages; i++)  // above the diagonal scores stay zeros
    for (int e = threadIdx.x; e < kTile / 8; e += blockDim.x)
      reinterpret_cast<uint4*>(shared.tables[i].scores)[e] = {0, 0, 0, 0};
  fence_shared();
  __syncthreads();

  if (group < S::kPreparers) {
    set_registers<S::kRegisters, S::kPrepareRegisters>();
    Preparer<S, kStages, kNormalise, kDealing> preparer{shared, a, cut, group, warp, lane, group};
    preparer.walk({q_map, k_map, v_map, y_map});
  } else {
    set_registers<S::kRegisters, S::kStateRegisters>();
    Keeper<S, kStages, kDealing> keeper(shared, a, cut, group - S::kPreparers);
    keeper.walk();
  }
}
