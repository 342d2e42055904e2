// The delta rule in chunks of 32 tokens on tensor cores, for float32 and float16. With e_j the
// error that token j finds, v_j - k_j (gate_j S_{j-1}), it is the linear rule with e for v:
//
//   e_i = v_i - d_i k_i S - sum_{j < i} (k_i . k_j) D_ij e_j
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij e_j        S <- d_31 S + sum_j D_31,j k_j e_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay32.cuh). The first
// line is solved before S is known (delta32_prepare.cuh): e = W v - W d k S, a product and a sum.
//
// A block walks through the chunks of a sequence for kCols columns of V of one head. Its warps have
// roles: some have q, k and v copied; one makes decays; teams of four prepare chunks, by turns;
// some keep the state, write it into shared memory before each chunk, find errors and advance it;
// the others make outputs, by turns. Chunks go from hand to hand through barriers in shared memory,
// and nobody waits for more than what it needs.
#include "delta32_feed.cuh"

// Outputs by warp `warp` of those that make them: 16 rows of every kTurns-th chunk. The second 16
// rows are more work: warps change places from chunk to chunk.
template <class S>
__device__ __forceinline__ void make_outputs(const CallArgs& a, Shared<S>& shared, int warp,
                                             int lane) {
  using In = typename S::In;
  const Item& item = shared.item;
  const int turn = warp % S::kTurns, rest = warp / S::kTurns;
  const int own0 = rest / 2 * S::kOutCols, tokens = item.tokens, chunks = item.chunks;
  const int col = own0 + lane % 4 * 2, cols = item.cols - col;
  const float scale = static_cast<float>(a.scale);
  const long long stride = a.y_stride[1];
  In* const y = static_cast<In*>(a.y) + item.y + col;
  int block = rest % 2;
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot;
  stage.skip(turn);
  slot.skip(turn);
#pragma unroll 1
  for (int c = turn; c < chunks; c += S::kTurns, block ^= 1) {
    OutTiles<S::kProducts, S::kKeyTiles, S::kKeyRow, S::kValueRow, S::kOutCols / 8> tiles;
    shared.known[slot.slot].wait(slot.parity);
    tiles.make(shared.queries(stage.slot), shared.keys(stage.slot), shared.values(stage.slot),
               shared.states[slot.slot], own0, shared.decays[stage.slot], block, lane);
    arrive(shared.used[slot.slot], lane);
    arrive_together(shared.free[stage.slot], lane);
    stage.skip(S::kTurns);
    slot.skip(S::kTurns);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = c * kChunk + block * kBlock + i * 8 + lane / 4;
      In* const row = y + t * stride;
      if (t >= tokens) continue;
#pragma unroll
      for (int n = 0; n < S::kOutCols / 8; n++) {
        const float y0 = scale * tiles.y[n][i * 2], y1 = scale * tiles.y[n][i * 2 + 1];
        if (S::kWide > 1) {
          if (n * 8 < cols) store_pair(row + n * 8, y0, y1);
        } else {
          if (n * 8 < cols) row[n * 8] = Narrow<In>::from(y0);
          if (n * 8 + 1 < cols) row[n * 8 + 1] = Narrow<In>::from(y1);
        }
      }
    }
  }
}

// Zeros for tokens of no sequence, by the warps that make outputs.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item, int thread) {
  using In = typename S::In;
  In* const y = static_cast<In*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = thread; e < (a.T - item.stop) * item.cols; e += 32 * S::kOutWarps)
    y[e / item.cols * a.y_stride[1] + e % item.cols] = In{};
}

// The state, by warp `warp` of those that keep it: a part of it through all chunks.
template <class S>
__device__ __forceinline__ void keep_state(const CallArgs& a, Shared<S>& shared, int warp,
                                           int lane) {
  const Item& item = shared.item;
  const int part = warp % S::kStateParts, row0 = part * S::kStateRows;
  const int own0 = warp / S::kStateParts * 16, barrier = 2 + S::kTeams + warp / S::kStateParts;
  ErrorTiles<S::kProducts, S::kKeyRow, S::kValueRow, S::kStateRows / 8, S::kStateParts> tiles;
  tiles.clear_carry();
  tiles.each(lane, [&](float& s, int i, int j) {
    s = 0;
    if (a.initial_state && row0 + i < S::K && own0 + j < item.cols)
      s = static_cast<const float*>(
          a.initial_state)[item.n * a.state_stride[0] + item.h * a.state_stride[1] +
                           (row0 + i) * a.state_stride[2] +
                           (item.col0 + own0 + j) * a.state_stride[3]];
  });
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot;
#pragma unroll 1
  for (int c = 0; c < item.chunks; c++, stage.skip(1), slot.skip(1)) {
    shared.used[slot.slot].wait(slot.parity ^ 1);
    tiles.publish(shared.states[slot.slot], row0, own0, afresh(lane));
    shared.prepared[slot.slot].wait(slot.parity);
    tiles.find_errors(shared.writes[slot.slot] + row0, shared.values(stage.slot), own0, part,
                      barrier, afresh(lane));
    arrive(shared.known[slot.slot], lane);
    tiles.advance(shared.keys(stage.slot), row0, shared.decays[stage.slot], afresh(lane));
    arrive(shared.free[stage.slot], lane);
  }
  if (a.state) {
    float* const kept = static_cast<float*>(a.state) + item.nh * (S::K * S::V);
    tiles.each(lane, [&](float& s, int i, int j) {
      if (row0 + i < S::K && own0 + j < item.cols)
        kept[(row0 + i) * S::V + item.col0 + own0 + j] = s;
    });
  }
}

// Chunks by four warps, kTeams chunks at a time.
template <class S>
__device__ __forceinline__ void prepare(Shared<S>& shared, int warp, int lane) {
  const int chunks = shared.item.chunks, team = warp / kPreparers;
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot;
  stage.skip(team);
  slot.skip(team);
#pragma unroll 1
  for (int c = team; c < chunks; c += S::kTeams) {
    shared.known[slot.slot].wait(slot.parity ^ 1);  // writes of an earlier chunk have been read
    shared.loaded[stage.slot].wait(stage.parity);
    shared.made[stage.slot].wait(stage.parity);
    const Preparer<S::kProducts, S::kKeyTiles, S::kValueTiles, S::kKeyRow, S::kValueRow> preparer{
        shared.benches[team], 1 + team, warp % kPreparers, afresh(lane)};
    preparer.make(shared.writes[slot.slot], shared.keys(stage.slot), shared.values(stage.slot),
                  shared.decays[stage.slot]);
    arrive(shared.prepared[slot.slot], lane);
    stage.skip(S::kTeams);
    slot.skip(S::kTeams);
  }
}

template <class S>
__device__ __forceinline__ void set_up(Shared<S>& shared) {
  for (int i = 0; i < S::kStages; i++) {
    shared.loaded[i].init(32 * S::kCopyWarps);
    init_for_warps(shared.made[i], 1);
    init_for_warps(shared.free[i], S::kStateWarps + S::kParts);
  }
  for (int i = 0; i < S::kSlots; i++) {
    init_for_warps(shared.prepared[i], kPreparers);
    init_for_warps(shared.known[i], S::kStateWarps);
    init_for_warps(shared.used[i], S::kParts);
  }
}

// grid: N * H * ceil(V / kCols) blocks. block: Shape::kThreads.
template <class In, int K, int V, int kCols, int kTeams, int kTurns, int kStages, int kSlots,
          int kOutCols, int kStateRows, int kCopyWarps, int kProducts, int kWide, bool kNormalise>
__global__ void __launch_bounds__(
    Shape<In, K, V, kCols, kTeams, kTurns, kStages, kSlots, kOutCols, kStateRows, kCopyWarps,
          kProducts, kWide, kNormalise>::kThreads,
    1) delta32(const CallArgs a) {
  using S = Shape<In, K, V, kCols, kTeams, kTurns, kStages, kSlots, kOutCols, kStateRows,
                  kCopyWarps, kProducts, kWide, kNormalise>;
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared = *reinterpret_cast<Shared<S>*>(raw);
  if (S::kPadded)  // with zeros, and numbers written over them are zeros
    for (int i = 4 * threadIdx.x; i < S::kNumbers; i += 4 * S::kThreads)
      *reinterpret_cast<Run<float, 4>*>(shared.stages[0] + i) = {};
  if (threadIdx.x == 0) shared.item = find_item<S>(a);
  if (threadIdx.x == 32) set_up(shared);
  __syncthreads();

  const int lane = threadIdx.x % 32;
  const Role role = find_role<S>(threadIdx.x / 32);
  if (role.job == kOutputs) {
    make_outputs(a, shared, role.index, lane);
    if (a.cu_seqlens && shared.item.n == a.N - 1)
      clear_rest<S>(a, shared.item, 32 * role.index + lane);
  } else if (role.job == kState) {
    keep_state(a, shared, role.index, lane);
  } else if (role.job == kPreparations) {
    prepare(shared, role.index, lane);
  } else if (role.index == 0) {
    make_decays(a, shared, lane);
  } else if (role.index <= kCopyWarps) {
    copy(a, shared, 32 * (role.index - 1) + lane);
  }
}
