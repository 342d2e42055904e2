// The linear rule in chunks of 64 tokens on the warpgroup products of sm_90a, for bfloat16 inputs
// that the copy engine can read. The equations are those of linear.cu.
//
// A block walks through the chunks of a sequence of one head. Its warpgroups have roles:
//   the first feeds: one warp has q, k and v copied, three make decays;
//   one for every 64 rows of the state keeps them and writes them, rounded, into shared memory;
//   the others make outputs, by turns.
// Stages, tables of decays and rounded states go from hand to hand through barriers in shared
// memory.
//
// Where heads are too few to fill the chip (kPieces), each block has a piece of a sequence and
// walks through it twice: first from its end to its start for the state it would leave if it began
// with none, then, once the blocks of the head have put their states together, for the outputs.
// What the first pass read last, the second finds in the L2 cache. All blocks must run at once.
#include "state_sm90.cuh"

// grid: any number of blocks, or as many as there are pieces. block: 512 threads.
template <int K, int V, int kStages, bool kPieces>
__global__ void __launch_bounds__(4 * kGroup, 1)
    linear(const CallArgs a, const PieceArgs pieces, const __grid_constant__ TensorMap q_map,
           const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
           const __grid_constant__ TensorMap y_map) {
  using S = Shape<K, V>;
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared =
      *reinterpret_cast<Shared<S, kStages>*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32 % 4;
  const auto twice = [](const Walk& w) { return kPieces && !w.last_piece(); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      shared.loaded[i].init(1);
      shared.free[i].init(S::kConsumers);
    }
    for (int i = 0; i < S::kDecays; i++) {
      shared.decays_made[i].init(1);
      shared.decays_free[i].init(S::kConsumers);
    }
    for (int i = 0; i < S::kStates; i++) {
      shared.state_made[i].init(4 * S::kStateGroups);
      shared.state_free[i].init(4);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    set_registers<128, S::kFeedRegisters>();
    Walk w(a, pieces);
    if (warp == 0) {
      if (lane > 0) return;
      Turn<kStages> stage;
      while (w.next()) {
#pragma unroll 1
        for (int backwards = twice(w); backwards >= 0; backwards--)
          load(shared, w, stage, q_map, k_map, v_map, backwards);
      }
    } else {
      unsigned done = 0;
      while (w.next()) {
#pragma unroll 1
        for (int backwards = twice(w); backwards >= 0; backwards--, done += w.chunks)
          make_decays(shared, w, done, warp - 1, backwards, lane);
      }
    }
  } else if (group <= S::kStateGroups) {
    set_registers<128, S::kStateRegisters>();
    constexpr int kThreads = S::kStateGroups * kGroup, kBarrier = 3;
    const int thread = threadIdx.x - kGroup;
    State<K, V, kStages> state(shared, group - 1, warp, lane, pieces.zero);
    const Places<K, V> places{state.row0 + lane / 4, lane % 4 * 2, thread};
    Walk w(a, pieces);
    while (w.next()) {
      const long long user_state = w.head() * (static_cast<long long>(pieces.K) * pieces.V);
      if constexpr (kPieces) {
        const long long at = w.piece * (a.N * a.H) + w.head();
        float4* const own = reinterpret_cast<float4*>(pieces.states + at * (K * V));
        unsigned* const arrivals = pieces.arrivals + 2 * w.head();
        if (!w.last_piece()) {
#pragma unroll
          for (int i = 0; i < V / 2; i++) state.s[i] = 0;
          const float whole = state.template pass<true>(w.chunks);
          places.write(state.s, own);
          if (thread == 0) __stcg(pieces.decays + at, whole);
          arrive_all<kThreads>(arrivals, kBarrier, thread == 0);
        }
        wait_all<kThreads>(arrivals, pieces.pieces - 1, kBarrier, thread == 0);
        join<K, V, 8, kThreads>(a, pieces, w, thread);
        arrive_all<kThreads>(arrivals + 1, kBarrier, thread == 0);
        wait_all<kThreads>(arrivals + 1, pieces.pieces, kBarrier, thread == 0);
        places.read(state.s, own);
      } else {
        const float* const from =
            a.initial_state ? static_cast<const float*>(a.initial_state) + user_state : nullptr;
        places.each(state.s, pieces,
                    [=](float& x, int at, bool real) { x = from && real ? from[at] : 0.f; });
      }
      state.template pass<false>(w.chunks);
      if (a.state && w.last_piece()) {
        float* const to = static_cast<float*>(a.state) + user_state;
        places.each(state.s, pieces, [=](float& x, int at, bool real) {
          if (real) to[at] = x;
        });
      }
    }
  } else {
    set_registers<128, S::kOutRegisters>();
    const int turn = group - 1 - S::kStateGroups;
    unsigned short* const out = shared.outs[turn];
    const float scale = static_cast<float>(a.scale);
    Walk w(a, pieces);
    Turn<kStages> stage;
    Turn<S::kDecays> table;
    Turn<S::kStates> state;
    Turn<S::kOutGroups> group_at;
    while (w.next()) {
      if (twice(w)) {  // this group has no part in the first pass, and waits for its end
        for (int c = 0; c < w.chunks; c++) stage.next(), table.next();
        if (w.chunks > turn) shared.state_made[turn].wait(0);  // the first state it will consume
      }
      unsigned short* const y =
          static_cast<unsigned short*>(a.y) + w.b * a.y_stride[0] + w.h * a.y_stride[2];
      for (int c = 0; c < w.chunks;
           c++, stage.next(), table.next(), state.next(), group_at.next()) {
        if (group_at.slot != turn) continue;
        const unsigned short* const q = shared.stages[stage.slot];
        const unsigned short* const k = q + S::kQuery;
        const unsigned short* const v = k + S::kKeyTiles * kTile;
        const Decay& decay = shared.decays[table.slot];
        float scores[32], o[V / 2];
        shared.decays_made[table.slot].wait(table.parity);
        shared.loaded[stage.slot].wait(stage.parity);
        settle(scores);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < K / 16; i++)
          wgmma<false>(scores, factor(q + i / 4 * kTile + i % 4 * 16),
                       factor(k + i / 4 * kTile + i % 4 * 16), i == 0);
        wgmma_commit();
        shared.state_made[state.slot].wait(state.parity);
        settle(o);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < K / 16; i++)
          wgmma<true>(o, factor(q + i / 4 * kTile + i % 4 * 16),
                      factor(shared.states[state.slot] + i * 16 * 64, K * 128), i == 0);
        wgmma_commit();
        const RowWeights weights(decay, warp, lane, scale);
        const float from0 = bounded(scale * decay.from_start[warp * kBlock + lane / 4]);
        const float from1 = bounded(scale * decay.from_start[warp * kBlock + lane / 4 + 8]);
        wgmma_wait<1>();
        settle(scores);
        unsigned p[kBlocks][4];
        if (__builtin_expect(decay.wild, 0))
          weigh_row<true>(p, scores, decay, warp, lane, scale);
        else
          weights.weigh(p, scores, decay, warp, lane);
        wgmma_wait<0>();
        settle(o);
        __syncwarp();
        if (lane == 0) {
          shared.state_free[state.slot].arrive();
          shared.decays_free[table.slot].arrive();
        }
#pragma unroll
        for (int i = 0; i < V / 2; i++) o[i] *= i / 2 % 2 ? from1 : from0;
        settle(o);
        wgmma_begin();
#pragma unroll
        for (int j = 0; j < kBlocks; j++)
          wgmma<true>(o, p[j], factor(v + j * kBlock * 64, 2 * kTile));
        wgmma_commit();
        if (warp == 0 && lane == 0) wait_stores_read();
        sync_threads<kGroup>(1 + turn);  // the tile before has been stored
        wgmma_wait<0>();
        settle(o);
        __syncwarp();
        if (lane == 0) shared.free[stage.slot].arrive();
        const unsigned none = after(o[0], pieces.zero);
#pragma unroll
        for (int i = 0; i < V / 16; i++) {
          unsigned packed[4];
#pragma unroll
          for (int j = 0; j < 4; j++)
            packed[j] = pack_bfloat16(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]) |
                        (i < kBlocks ? p[i][j] & none : 0);
          stmatrix_x4(
              out + i / 4 * kTile + swizzled(warp * kBlock + lane % 16, i % 4 * 2 + lane / 16),
              packed[0], packed[1], packed[2], packed[3]);
        }
        fence_shared();
        sync_threads<kGroup>(1 + turn);
        const int t = w.start + c * kChunk;
        if (t + kChunk <= w.stop || w.stop == a.T) {
          if (warp == 0 && lane == 0) {
            for (int i = 0; i < S::kValueTiles; i++)
              store_tile(y_map, out + i * kTile, i * 64, w.h, t, w.b);
            commit_stores();
          }
        } else {  // rows of the next sequence follow
#pragma unroll 1
          for (int e = threadIdx.x % kGroup; e < kChunk * V; e += kGroup) {
            const int row = e / V, col = e % V;
            if (t + row < w.stop && col < pieces.V)
              y[static_cast<long long>(t + row) * a.y_stride[1] + col] =
                  out[col / 64 * kTile + swizzled(row, col % 64 / 8) + col % 8];
          }
        }
      }
      if (a.cu_seqlens && w.n == a.N - 1 && w.last_piece())  // tokens of no sequence
#pragma unroll 1
        for (long long e = threadIdx.x % kGroup; e < (a.T - w.end) * pieces.V; e += kGroup)
          y[(w.end + e / pieces.V) * a.y_stride[1] + e % pieces.V] = 0;
    }
    if (warp == 0 && lane == 0) wait_stores();
  }
}
