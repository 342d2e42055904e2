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
// walks through it twice: first from its end towards its start, as far back as gates remember, for
// the state it would leave if it began with none; then, once the blocks of the head have exchanged
// their states, for the outputs (pieces_sm90.cuh). What the first pass read last, the second finds
// in the L2 cache. All blocks must run at once.
#include "pieces_sm90.cuh"
#include "queue_sm90.cuh"

// grid: any number of blocks, or as many as there are pieces. block: 512 threads.
template <int K, int V, int kStages, Dealing kDealing>
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
  constexpr bool kPieces = kDealing == kInPieces;
  constexpr int kAttempts = kPieces ? 2 : 1;
  Turn<kItems> dealt;
  Walk first(a, pieces);
  if (kPieces) first.next();  // the only one, for all roles
  const auto next = [&](Walk& w) {
    if constexpr (kPieces) return true;
    if constexpr (kDealing == kByQueue) return take(shared, w, dealt, lane);
    return w.next();
  };
  const auto last = [](const Walk& w) { return !kPieces || w.last_piece(); };
  const auto twice = [&](const Walk& w) { return !last(w); };
  // Whether the first attempt at a piece was enough, once that is known.
  const auto all_well = [&](int attempt) {
    if (!kPieces || attempt > 0) return true;
    shared.judged.wait(0);
    return !shared.again;
  };
  if (kDealing != kByQueue && group == 0 &&
      warp > 0) {  // all wait for the first gates, so they go ahead of other loads
    Walk w = kPieces ? first : Walk(a, pieces);
    if (next(w)) begin_decays(shared.gates, w, 0, warp - 1, twice(w), lane);
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      shared.loaded[i].init(1);
      init_for_warps(shared.free[i], S::kConsumers);
    }
    for (int i = 0; i < S::kDecays; i++) {
      init_for_warps(shared.decays_made[i], 1);
      init_for_warps(shared.decays_free[i], S::kConsumers);
    }
    for (int i = 0; i < S::kStates; i++) {
      init_for_warps(shared.state_made[i], 4 * S::kStateGroups);
      init_for_warps(shared.state_free[i], 4);
    }
    for (int i = 0; i < kItems; i++) {
      shared.dealt[i].init(1);
      init_for_warps(shared.taken[i], S::kThreads / 32 - 1);
    }
    shared.counted.init(1);
    shared.judged.init(1);
    shared.again = 0;
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    set_registers<128, S::kFeedRegisters>();
    Walk w = kPieces ? first : Walk(a, pieces);
    if (kDealing == kByQueue && warp == 0) {
      feed_from_queue(shared, w, pieces.taken, q_map, k_map, v_map, lane);
    } else if (warp == 0) {
      Turn<kStages> stage;
      while (next(w)) {
#pragma unroll 1
        for (int attempt = 0; attempt < kAttempts; attempt++) {
          // Backwards: what is needed for sure, the rest of what is needed; then forwards.
          int c = 0;
#pragma unroll 1
          for (int part = kPieces ? 0 : 2; part < 3; part++) {
            const bool backwards = part < 2;
            int stop = w.chunks;
            if (part == 0) stop = attempt == 0 ? min(kSure, stop) : 0;
            if (part == 1 && attempt == 0) stop = begin_piece(shared, w, lane);
            if (!backwards) c = 0;
            if (backwards && !twice(w)) continue;
            if (lane == 0) load(shared, w, c, stop, stage, q_map, k_map, v_map, backwards);
            c = stop;
          }
          __syncwarp();
          if (all_well(attempt)) break;
        }
        if (a.cu_seqlens && w.n == a.N - 1 && last(w))
          clear_rest(a, pieces.V, w.end, w.h, 1, 0, 1, lane);
        if (kPieces) break;
      }
    } else {
      unsigned done = 0;
      bool begun = kDealing != kByQueue;
      while (next(w)) {
#pragma unroll 1
        for (int attempt = 0; attempt < kAttempts; attempt++) {
#pragma unroll 1
          for (int backwards = twice(w); backwards >= 0; backwards--) {
            done +=
                make_decays(shared, w, done, warp - 1, begun, backwards, backwards > attempt, lane);
            begun = false;
          }
          if (all_well(attempt)) break;
        }
        if (kPieces) break;
      }
    }
  } else if (group <= S::kStateGroups) {
    set_registers<128, S::kStateRegisters>();
    constexpr int kThreads = S::kStateGroups * kGroup;
    const int thread = threadIdx.x - kGroup;
    State<K, V, kStages> state(shared, group - 1, warp, lane, pieces.zero);
    const Places<K, V> places{state.row0 + lane / 4, lane % 4 * 2, thread};
    Walk w = kPieces ? first : Walk(a, pieces);
    while (next(w)) {
      const long long user_state = w.head() * (static_cast<long long>(pieces.K) * pieces.V);
      if constexpr (kPieces) {
        const Piece<K, V, kStages, kThreads> piece{a, pieces, w, places, shared, thread};
#pragma unroll 1
        for (int attempt = 0; attempt < kAttempts; attempt++) {
          const auto needed = [&] { return attempt > 0 ? w.chunks : shared.needed; };
          float bound = 0;  // of a state that may be forgotten; below 0, of none
          if (twice(w)) {
            int chunks = attempt > 0 ? w.chunks : min(kSure, w.chunks);
#pragma unroll
            for (int i = 0; i < V / 2; i++) state.s[i] = 0;
            const float whole = state.template pass<true>(chunks);
            bound = fminf(kNegligible * state.largest() / fmaxf(fabsf(whole), kLeast), kLargest);
            piece.leave(state.s, whole, chunks == w.chunks);
          }
          shared.counted.wait(0);
          piece.arrive(attempt == 0 ? kLeft : kLeftAgain, needed() < w.chunks, kCut);
          const auto cut = piece.wait(attempt == 0 ? kLeft : kLeftAgain);
          if (attempt > 0 || !cut.any(kCut)) bound = -1;
          if (attempt == 0 && bound < 0 && thread == 0) shared.judged.arrive();
          piece.read(state.s, attempt, attempt == 0 && cut.all(kCut));
#pragma unroll 1
          for (int part = 0; part < 2; part++) {
            if (part > 0 && bound >= 0) piece.doubt(needed() < w.chunks && !(state.sum() <= bound));
            state.pass_forwards(part > 0 ? needed() : w.chunks - needed());
          }
          if (bound >= 0) {
            const bool again = piece.wait(kJudged).any(kAgain);
            if (thread == 0) {
              shared.again = again;
              shared.judged.arrive();
            }
          }
          if (all_well(attempt)) break;
        }
      } else {
        const float* const from =
            a.initial_state ? static_cast<const float*>(a.initial_state) + user_state : nullptr;
        places.read(state.s, pieces, from);
        state.pass_forwards(w.chunks);
      }
      if (a.state && last(w))
        places.write(state.s, pieces, static_cast<float*>(a.state) + user_state);
      if (kPieces) break;
    }
  } else {
    set_registers<128, S::kOutRegisters>();
    const int turn = group - 1 - S::kStateGroups;
    unsigned short* const out = shared.outs[turn];
    const float scale = static_cast<float>(a.scale);
    Walk w = kPieces ? first : Walk(a, pieces);
    Turn<kStages> stage;
    Turn<S::kDecays> tables;
    Turn<S::kStates> state;
    Turn<S::kOutGroups> group_at;
    while (next(w)) {
#pragma unroll 1
      for (int attempt = 0; attempt < kAttempts; attempt++) {
        if (twice(w)) {  // this group has no part in the first pass, and waits for its end
          int needed = w.chunks;
          if (attempt == 0) {
            shared.counted.wait(0);
            needed = shared.needed;
          }
          for (int c = 0; c < needed; c++) stage.next(), tables.next();
        }
        if (kPieces) {
          group_at = {};
          auto first = state;
          if (turn > 0) first.next();
          if (w.chunks > turn) shared.state_made[first.slot].wait(first.parity);
        }
        for (int t = w.start; t < w.stop;
             t += kChunk, stage.next(), tables.next(), state.next(), group_at.next()) {
          if (group_at.slot != turn) continue;
          const unsigned short* const q = shared.stages[stage.slot];
          const unsigned short* const k = q + S::kQuery;
          const unsigned short* const v = k + S::kKeyTiles * kTile;
          const auto table = same_turn(tables, stage);
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
            weights.weigh<true>(p, scores, decay, warp, lane);
          else
            weights.weigh<false>(p, scores, decay, warp, lane);
          wgmma_wait<0>();
          settle(o);
          arrive(shared.state_free[state.slot], lane);
          arrive_together(shared.decays_free[table.slot], lane);
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
          arrive(shared.free[stage.slot], lane);
          const unsigned none = after(o[0], pieces.zero);
          const int at = afresh(swizzled(warp * kBlock + lane % 16, lane / 16));
#pragma unroll
          for (int i = 0; i < V / 16; i++) {
            unsigned packed[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
              packed[j] = pack_bfloat16(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]) |
                          (i < kBlocks ? p[i][j] & none : 0);
            stmatrix_x4(out + i / 4 * kTile + (at ^ i % 4 * 16), packed[0], packed[1], packed[2],
                        packed[3]);
          }
          fence_shared();
          sync_threads<kGroup>(1 + turn);
          if (t + kChunk <= w.stop || w.stop == a.T) {
            if (warp == 0 && lane == 0) {
              for (int i = 0; i < S::kValueTiles; i++)
                store_tile(y_map, out + i * kTile, i * 64, w.h, t, w.b);
              commit_stores();
            }
          } else {  // rows of the next sequence follow
            unsigned short* const y = static_cast<unsigned short*>(a.y) +
                                      afresh(w.b) * a.y_stride[0] + afresh(w.h) * a.y_stride[2] +
                                      afresh(t) * a.y_stride[1];
            store_rows<V>(y, a.y_stride[1], w.stop - t, pieces.V, out, threadIdx.x % kGroup);
          }
        }
        if (kPieces && warp == 0 && lane == 0) wait_stores();
        if (all_well(attempt)) break;
      }
      if (kPieces) break;
    }
    if (!kPieces && warp == 0 && lane == 0) wait_stores();
  }
}
